"""Pages of what an aggregator has: what all servers upstream have, and what is private to clients here, by name."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gradserve_protocol.placement import home_of
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, parameters_messages_pb2
from gradserve_server.errors import NotFoundError
from gradserve_server.rpc.boundary.fields import Page, page_of
from gradserve_server.rpc.boundary.messages import Serialized
from gradserve_server.rpc.upstream.messages import copied, method_of, ref_of

if TYPE_CHECKING:
    from gradserve_server.rpc.upstream.link import UpstreamLink


_Pages = TypeVar("_Pages", messages_pb2.ListAccumulatorsResponse, parameters_messages_pb2.ListParametersResponse)


async def listed(link: UpstreamLink, request: Any, kind: type[_Pages], here: _Pages | Serialized) -> _Pages:
    """Lists what this server and all servers upstream have; returns one page.

    Args:
        link: The servers upstream.
        request: The request for the page.
        kind: The class of the responses.
        here: The response of this server for what it has itself.

    Raises:
        ServiceError: See `UpstreamLink.call`.
    """
    page = page_of(request.page_size, request.page_token, default_size=100)
    own = kind.FromString(here.data) if isinstance(here, Serialized) else here
    targets = range(link.cluster.size)
    calls = [link.call(method_of(request), copied(request), target=target) for target in targets]
    there: list[_Pages] = await asyncio.gather(*calls)
    return _merged(page, request.container, own, there)


def _merged(page: Page, container: str, here: _Pages, upstream: Sequence[_Pages]) -> _Pages:
    """Returns one page out of the pages that several lists have for the same `page_token` and `page_size`.

    Each is sorted by name, and so is the result. Names after the end of a page that is not its list's last may be
    preceded by others of that list, so they are left to the next page. A sharded accumulator is in the lists of all of
    its servers, and in the result as its home describes it, with the memory of all.

    Args:
        page: The page.
        container: The container, as in the request.
        here: The page of what this server has itself.
        upstream: Those of the servers upstream, in their order.
    """
    responses: list[Any] = [here, *upstream]
    entries = [_entries(each) for each in responses]
    ends = [_name(infos[-1]) for each, infos in zip(responses, entries, strict=True) if each.next_page_token and infos]
    end = min(ends, default=None)
    sizes = Counter[str]()
    for infos in entries:
        for info in infos:
            sizes[_name(info)] += info.num_bytes
    found = list(entries[0])
    for target, infos in enumerate(entries[1:]):
        for info in infos:
            if not _is_sharded(info) or home_of(container, _name(info), len(upstream)) == target:
                info.num_bytes = sizes[_name(info)]
                found.append(info)
    found.sort(key=_name)
    within = [info for info in found if end is None or _name(info) <= end]
    shown = within[: page.size]
    is_last = end is None and len(shown) == len(found)
    response = type(here)()
    response.next_page_token = page.next_token(_name(shown[-1]) if shown else "", is_last=is_last)
    _entries(response).extend(shown)
    return response


def _entries(response: Any) -> Any:
    if isinstance(response, parameters_messages_pb2.ListParametersResponse):
        return response.parameters
    return response.accumulators


def _name(info: Any) -> str:
    return ref_of(info).name


def _is_sharded(info: Any) -> bool:
    return isinstance(info, accumulator_pb2.AccumulatorInfo) and info.spec.num_shards > 0


async def delete(
    link: UpstreamLink, request: messages_pb2.DeleteAccumulatorRequest
) -> messages_pb2.DeleteAccumulatorResponse:
    """Deletes an accumulator at its home, and then what other servers have of it, but nothing of a later one.

    In this order: a home that stays would name gradients that others no longer have.

    Args:
        link: The servers upstream.
        request: The request of the client here, which need not know of other servers.

    Raises:
        ServiceError: See `UpstreamLink.call`; the other servers were still asked.
    """
    ref = request.accumulator
    named = accumulator_pb2.AccumulatorRef(container=ref.container, name=ref.name)
    is_everywhere = link.cluster.size > 1 and await _may_have_parts(link, named, ref.incarnation)
    response = await _deleted(link, ref, request.home_incarnation)
    if is_everywhere:
        home = link.cluster.home_of(ref.container, ref.name)
        gone = response.home_incarnation
        others = [_deleted(link, named, gone, target) for target in range(link.cluster.size) if target != home]
        for each in await asyncio.gather(*others, return_exceptions=True):
            if isinstance(each, BaseException):
                raise each
            response.deleted |= each.deleted
    response.ClearField("home_incarnation")
    return response


async def _deleted(
    link: UpstreamLink, ref: accumulator_pb2.AccumulatorRef, home_incarnation: str, target: int | None = None
) -> messages_pb2.DeleteAccumulatorResponse:
    request = messages_pb2.DeleteAccumulatorRequest(home_incarnation=home_incarnation)
    request.accumulator.CopyFrom(ref)
    response: messages_pb2.DeleteAccumulatorResponse = await link.call("DeleteAccumulator", request, target=target)
    return response


async def _may_have_parts(link: UpstreamLink, named: accumulator_pb2.AccumulatorRef, incarnation: str) -> bool:
    """Returns whether other servers than the home may have something of an accumulator that is to be deleted."""
    request = messages_pb2.GetAccumulatorRequest()
    request.accumulator.CopyFrom(named)
    try:
        info = (await link.call("GetAccumulator", request)).info
    except NotFoundError:
        return True  # of one that its home has lost
    return bool(info.spec.num_shards) and incarnation in ("", info.accumulator.incarnation)
