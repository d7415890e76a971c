"""The knowledge of an aggregator about accumulators and parameters upstream, and pages that list these with its own."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from gradserve_protocol.placement import home_of
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, parameters_messages_pb2
from gradserve_server.accumulators.gradient import Average, Packed, Value
from gradserve_server.accumulators.identity import CallsUnderWay, RequestId
from gradserve_server.accumulators.spec import AccumulatorSpec, Layout
from gradserve_server.errors import NotFoundError, ServiceError
from gradserve_server.resources.registry import DEFAULT_CONTAINER
from gradserve_server.rpc.boundary.fields import Page, page_of
from gradserve_server.rpc.boundary.messages import Serialized
from gradserve_server.rpc.upstream.messages import Answer, Contributed, Ref, copied, method_of, ref_of
from gradserve_server.rpc.upstream.shards import UpstreamShards
from gradserve_server.upstream.batches import Batches, Leaf
from gradserve_server.upstream.latest import LatestAverage

if TYPE_CHECKING:
    from gradserve_server.rpc.upstream.link import UpstreamLink


_MOST_ANSWERED = 4096
"""Answered calls that are remembered: one that comes again need not wait for others, which would be refused with it."""
_MOST_KNOWN = 10_000
"""Resources upstream that an aggregator remembers; it asks again for others."""

GradientLeaf = Leaf[Contributed, Answer]
SendStaged: TypeAlias = Callable[[str, Any, Mapping[str, Value | Packed], float], Awaitable[tuple[Any, Average | None]]]
"""Brings several servers their parts of a gradient, and then makes the call that adds it.

Takes the method, the request without values, the values, and the seconds that the call may wait. Returns the response,
and its average or version if it has one.
"""


class Aggregated:
    """The state that all calls on an accumulator share, and the gradients on their way. Parameters are like one.

    Attributes:
        name: Its name, for messages.
        incarnation: Tells it from a later one of the same name.
        spec: The spec of its gradients.
        batches: The gradients that wait for others.
        under_way: The calls that have not been answered.
        latest: Its newest average.
        shards: What each server upstream has of it; None if it is on one of them as a whole.
    """

    def __init__(
        self,
        ref: Ref,
        spec: AccumulatorSpec,
        new_batches: Callable[[Aggregated], Batches[GradientLeaf]],
        latest: LatestAverage,
        shards: UpstreamShards | None = None,
    ) -> None:
        self.name = f"{ref.container}/{ref.name}"
        self.incarnation = ref.incarnation
        self.spec = spec
        self.shards = shards
        self.under_way: CallsUnderWay[GradientLeaf] = CallsUnderWay()
        self.latest = latest
        self.batches = new_batches(self)
        self._answered: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._has_ended = False

    @property
    def send_staged(self) -> SendStaged | None:
        """Sends a gradient to several servers; None if it is on one of them as a whole."""
        return None if self.shards is None else self.shards.send

    @property
    def adds_up(self) -> bool:
        """True if its gradients may go together.

        Each row of a sparse mean is divided by the weights of only those gradients that have it, which a sum does not
        say.
        """
        return all(each.layout is Layout.DENSE for each in self.spec.components)

    def may_add(self, leaf: GradientLeaf) -> bool:
        """Returns True if a gradient may go together with others, and has not been answered before."""
        is_ordered = bool(leaf.contribution.worker_id) or not self.spec.deterministic
        is_again = bool(getattr(leaf.request, "accepted_before", False)) or _id_of(leaf) in self._answered
        return self.adds_up and is_ordered and not is_again and not self._has_ended

    def end(self) -> list[GradientLeaf]:
        """Notes that it is gone; returns the gradients that wait for others, of which there will be no more."""
        self._has_ended = True
        self.latest.end()
        return self.batches.close()

    def begin(self, call: RequestId | None, leaf: GradientLeaf) -> None:
        """Notes that a call is under way, until it is answered."""
        self.under_way.begin(call, leaf)
        leaf.answer.add_done_callback(lambda _: self._end(call, leaf))

    def _end(self, call: RequestId | None, leaf: GradientLeaf) -> None:
        self.under_way.end(call, leaf)
        if call is not None:
            self._answered[_id_of(leaf)] = None
            if len(self._answered) > _MOST_ANSWERED:
                self._answered.popitem(last=False)

    # Answers

    def leaves_values(self, leaf: GradientLeaf) -> bool:
        """Returns True if the answer to a call that goes alone is to come without values, which `complete` adds."""
        return False

    def share(self, leaf: GradientLeaf, answer: Answer) -> Answer:
        """Returns the answer to one call, of the answer to the sum that it is in."""
        return answer

    async def complete(self, leaf: GradientLeaf, answer: Answer, again: Callable[[], Awaitable[Answer]]) -> Answer:
        """Returns an answer with the values that it was to come without.

        Args:
            leaf: The call that is answered.
            answer: The answer.
            again: Makes the call again, which counts once, for an answer with values.
        """
        return answer


def _id_of(leaf: GradientLeaf) -> tuple[str, int]:
    return leaf.request.request_id.client_id, leaf.request.request_id.sequence


AggregatedT = TypeVar("AggregatedT", bound=Aggregated)


class KnownUpstream(Generic[AggregatedT]):
    """The resources of one kind that an aggregator knows upstream, by container and name.

    Used on the event loop only.
    """

    def __init__(
        self,
        describe: Callable[[Ref], Awaitable[Any]],
        check: Callable[[Ref], Awaitable[object]],
        make: Callable[[Any], Awaitable[AggregatedT]],
        forward: Callable[[AggregatedT, Sequence[GradientLeaf]], object],
    ) -> None:
        """Begins empty.

        Args:
            describe: Returns the server's description of what a name stands for.
            check: Raises NotFoundError if a name with an incarnation stands for nothing; cheaper than `describe`.
            make: Makes what is to be known of a description.
            forward: Called with each gradient that waits for others when what it is for is forgotten.
        """
        self._describe = describe
        self._check = check
        self._make = make
        self._forward = forward
        self._known: OrderedDict[tuple[str, str], AggregatedT] = OrderedDict()

    def __iter__(self) -> Iterator[AggregatedT]:
        return iter(self._known.values())

    async def find(self, ref: Ref) -> AggregatedT:
        """Returns what a request names, and makes the name that of this very one.

        So what is known here is used for no other: once it is deleted, the server upstream refuses the request. A name
        without an incarnation is that of the one which is there now.

        Raises:
            ServiceError: See `UpstreamLink.call`.
        """
        found = self._known.get(_key_of(ref))
        if found is None or not await self._is_named(ref, found):
            found = await self.remember(await self._describe(ref))
        ref.incarnation = found.incarnation
        return found

    async def remember(self, info: Any) -> AggregatedT:
        """Returns what is known of a resource that the server upstream has described.

        Raises:
            ServiceError: It is nothing that this server can forward to.
        """
        ref = ref_of(info)
        key = (ref.container, ref.name)
        known = self._known.get(key)
        if known is None or known.incarnation != ref.incarnation:
            made = await self._make(info)
            known = self._known.get(key)  # another call may have been faster
            if known is None or known.incarnation != made.incarnation:
                self._forget(key)
                known = self._known[key] = made
        self._known.move_to_end(key)
        for oldest in list(self._known)[: len(self._known) - _MOST_KNOWN]:
            if not self._known[oldest].batches.num_waiting:
                self._forget(oldest)
        return known

    def forget(self, ref: Ref) -> None:
        """Forgets something that may be gone; gradients that wait for others here go upstream one by one."""
        self._forget(_key_of(ref))

    def close(self, error: ServiceError) -> None:
        """Ends the calls whose gradients wait for others: nothing of them has counted."""
        for each in self:
            for leaf in each.batches.close(error):
                leaf.fail(error)

    def _forget(self, key: tuple[str, str]) -> None:
        gone = self._known.pop(key, None)
        if gone is not None:
            for leaf in gone.end():
                self._forward(gone, [leaf])

    async def _is_named(self, ref: Ref, known: AggregatedT) -> bool:
        """Returns True if a request names a known resource; asks upstream if it may as well name a later one."""
        if ref.incarnation:
            return ref.incarnation == known.incarnation
        asked = type(ref)()
        asked.CopyFrom(ref)  # type: ignore[arg-type]
        asked.incarnation = known.incarnation
        try:
            await self._check(asked)
        except NotFoundError:
            return False
        return True


def _key_of(ref: Ref) -> tuple[str, str]:
    return ref.container or DEFAULT_CONTAINER, ref.name


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
    preceded by others of that list, so they are left to the next page. What is sharded is in the lists of all of its
    servers, and in the result as its home describes it, with the memory of all.

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
    return bool(info.spec.num_shards)


DeletionT = TypeVar("DeletionT", messages_pb2.DeleteAccumulatorRequest, parameters_messages_pb2.DeleteParametersRequest)


async def delete(link: UpstreamLink, request: DeletionT) -> Any:
    """Deletes something at its home, and then what other servers have of it, but nothing of a later one.

    Returns the response. In this order: a home that stays would name gradients that others no longer have.

    Args:
        link: The servers upstream.
        request: The request of the client here, which need not know of other servers.

    Raises:
        ServiceError: See `UpstreamLink.call`; the other servers were still asked.
    """
    ref = ref_of(request)
    named: Any = type(ref)(container=ref.container, name=ref.name)
    is_everywhere = link.cluster.size > 1 and await _may_have_parts(link, named, ref.incarnation)
    response = await _deleted(link, type(request), ref, request.home_incarnation)
    if is_everywhere:
        home = link.cluster.home_of(ref.container, ref.name)
        gone = response.home_incarnation
        targets = [target for target in range(link.cluster.size) if target != home]
        others = [_deleted(link, type(request), named, gone, target) for target in targets]
        for each in await asyncio.gather(*others, return_exceptions=True):
            if isinstance(each, BaseException):
                raise each
            response.deleted |= each.deleted
    response.ClearField("home_incarnation")
    return response


async def _deleted(
    link: UpstreamLink, kind: Callable[..., Any], ref: Ref, home_incarnation: str, target: int | None = None
) -> Any:
    request = kind(home_incarnation=home_incarnation)
    ref_of(request).CopyFrom(ref)  # type: ignore[arg-type]
    return await link.call(method_of(request), request, target=target)


async def _may_have_parts(link: UpstreamLink, named: Ref, incarnation: str) -> bool:
    """Returns whether other servers than the home may have something of what is to be deleted."""
    request: Any = (
        messages_pb2.GetAccumulatorRequest()
        if isinstance(named, accumulator_pb2.AccumulatorRef)
        else parameters_messages_pb2.GetParametersRequest()
    )
    ref_of(request).CopyFrom(named)  # type: ignore[arg-type]
    try:
        info = (await link.call(method_of(request), request)).info
    except NotFoundError:
        return True  # of one that its home has lost
    return bool(info.spec.num_shards) and incarnation in ("", ref_of(info).incarnation)
