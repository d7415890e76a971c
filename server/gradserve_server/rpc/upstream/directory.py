"""Pages of the accumulators of an aggregator: those of all servers upstream, and its own private ones, by name."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradserve_protocol.placement import home_of
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2
from gradserve_server.errors import NotFoundError
from gradserve_server.rpc.boundary.fields import Page

if TYPE_CHECKING:
    from gradserve_server.rpc.upstream.link import UpstreamLink


def merged(
    page: Page,
    container: str,
    here: messages_pb2.ListAccumulatorsResponse,
    upstream: Sequence[messages_pb2.ListAccumulatorsResponse],
) -> messages_pb2.ListAccumulatorsResponse:
    """Returns one page out of the pages that several lists have for the same `page_token` and `page_size`.

    Each is sorted by name, and so is the result. Names after the end of a page that is not its list's last may be
    preceded by others of that list, so they are left to the next page. A sharded accumulator is in the lists of all of
    its servers, and in the result as its home describes it, with the memory of all.

    Args:
        page: The page.
        container: The container, as in the request.
        here: The page of this server's own accumulators.
        upstream: Those of the servers upstream, in their order.
    """
    responses = [here, *upstream]
    ends = [each.accumulators[-1].accumulator.name for each in responses if each.next_page_token and each.accumulators]
    end = min(ends, default=None)
    sizes = Counter[str]()
    for each in responses:
        for info in each.accumulators:
            sizes[info.accumulator.name] += info.num_bytes
    found = list(here.accumulators)
    for target, each in enumerate(upstream):
        for info in each.accumulators:
            if not info.spec.num_shards or home_of(container, info.accumulator.name, len(upstream)) == target:
                info.num_bytes = sizes[info.accumulator.name]
                found.append(info)
    found.sort(key=lambda info: info.accumulator.name)
    within = [info for info in found if end is None or info.accumulator.name <= end]
    shown = within[: page.size]
    is_last = end is None and len(shown) == len(found)
    last = shown[-1].accumulator.name if shown else ""
    return messages_pb2.ListAccumulatorsResponse(
        accumulators=shown, next_page_token=page.next_token(last, is_last=is_last)
    )


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
