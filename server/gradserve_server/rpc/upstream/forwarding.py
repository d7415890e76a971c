"""Passes gradients on to the server upstream: the sum of several as one, or one by one."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from gradserve.calls.identity import RequestIds
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2
from gradserve_server.accumulators.gradient import Average, Value
from gradserve_server.accumulators.identity import CallsUnderWay, RequestId
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.spec import AccumulatorSpec, Layout
from gradserve_server.errors import (
    AbortedError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ServiceError,
)
from gradserve_server.resources.budget import Budget, Purpose
from gradserve_server.rpc.accumulators.requests import GradientRequest
from gradserve_server.rpc.upstream.messages import Answer, Pulled, alone, answer_of, arrays_of, of_sum
from gradserve_server.rpc.upstream.shards import UpstreamShards
from gradserve_server.runtime.tasks import BackgroundTasks
from gradserve_server.upstream.batches import Batches, Counts, in_order, sum_bytes, summed
from gradserve_server.upstream.latest import LatestAverage
from gradserve_server.upstream.leaf import Leaf

if TYPE_CHECKING:
    from gradserve_server.rpc.upstream.link import UpstreamLink

_MOST_ANSWERED = 4096
"""Answered calls that are remembered: one that comes again need not wait for others, which would be refused with it."""

GradientLeaf = Leaf[GradientRequest, Answer]


class Aggregated:
    """The state that all calls on an accumulator share, and the gradients on their way.

    Attributes:
        name: Its name, for messages.
        incarnation: Tells it from a later accumulator of the same name.
        spec: Its spec.
        adds_up: Whether its gradients may go together. Each row of a sparse mean is divided by the weights of only
            those gradients that have it, which a sum does not say.
        batches: The gradients that wait for others.
        under_way: The calls that have not been answered.
        latest: Its newest average.
        shards: What each server upstream has of it; None if it is on one of them as a whole.
    """

    def __init__(
        self,
        info: accumulator_pb2.AccumulatorInfo,
        spec: AccumulatorSpec,
        new_batches: Callable[[Aggregated], Batches[GradientLeaf]],
        latest: LatestAverage,
        shards: UpstreamShards | None,
    ) -> None:
        self.name = f"{info.accumulator.container}/{info.accumulator.name}"
        self.incarnation = info.accumulator.incarnation
        self.spec = spec
        self.shards = shards
        self.adds_up = all(each.layout is Layout.DENSE for each in spec.components)
        self.under_way: CallsUnderWay[GradientLeaf] = CallsUnderWay()
        self.latest = latest
        self.batches = new_batches(self)
        self._answered: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._has_ended = False

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


def _id_of(leaf: GradientLeaf) -> tuple[str, int]:
    return leaf.request.request_id.client_id, leaf.request.request_id.sequence


_MARGIN_SECONDS = 1.0
"""The time that the server upstream waits longer than the callers here, who explain why they stop waiting."""
_LEFT_SECONDS = 60.0
"""The time for which nobody must have waited for a call upstream that is given up: by then the gradient has arrived."""


class Forwarding:
    """Passes gradients on, and gives their callers the answers. Used on the event loop only.

    A sum is refused, and nothing of it counts, if one of its calls has come upstream before, as after a restart of the
    aggregator, or if its values do not fit. Then its gradients go one by one, and each gets the answer that it would
    have got without an aggregator.
    """

    def __init__(self, link: UpstreamLink, place: Place, memory: Budget, ids: RequestIds, counts: Counts) -> None:
        self.link = link
        self.place = place
        """The memory in which sums are computed."""
        self.memory = memory
        """The budget of sums while they are forwarded."""
        self.counts = counts
        self.tasks = BackgroundTasks()
        self._ids = ids

    def forward(self, accumulator: Aggregated, leaves: Sequence[GradientLeaf]) -> None:
        """Begins to pass gradients on that may go together."""
        self.tasks.begin(self._forward(accumulator, leaves))

    async def _forward(self, accumulator: Aggregated, leaves: Sequence[GradientLeaf]) -> None:
        try:
            for group in _alike(leaves):
                if len(group) == 1:
                    self.tasks.begin(self._alone(accumulator, group[0]))
                else:
                    self.tasks.begin(self._together(accumulator, group))
        except Exception as error:
            _fail(leaves, error)
            raise

    async def _together(self, accumulator: Aggregated, leaves: Sequence[GradientLeaf]) -> None:
        try:
            try:
                answer = await self._sum(accumulator, leaves)
            except (AbortedError, InvalidArgumentError) as error:
                if isinstance(error, AbortedError) and error.field != "sum_of":
                    raise
                for each in leaves:
                    self.tasks.begin(self._alone(accumulator, each))
                return
            for each in leaves:
                each.succeed(answer)
        except Exception as error:
            _fail(leaves, error)
            if not isinstance(error, ServiceError):
                raise

    async def _sum(self, accumulator: Aggregated, leaves: Sequence[GradientLeaf]) -> Answer:
        ordered = [leaves[at] for at in in_order([each.contribution for each in leaves])]
        reservation = self.memory.reserve(purpose=Purpose.COMPUTING)
        try:
            async with AsyncExitStack() as reading:
                gradients = [await reading.enter_async_context(each.borrowed()) for each in ordered]
                reservation.grow(sum_bytes(accumulator.spec, gradients[0]))
                given = [(each.contribution, gradient) for each, gradient in zip(ordered, gradients, strict=True)]
                num_bytes = sum([gradient.nbytes for gradient in gradients])
                values = await self.place.compute.run(num_bytes, summed, accumulator.spec, self.place, given)
                del given, gradients
            for each in ordered:
                each.added_up()
            ref = ordered[0].request.accumulator
            request_id = self._new_id(ref)
            requests = [each.request for each in ordered]
            self.counts.sums += 1
            return await self._send(
                accumulator,
                ordered,
                values,
                lambda carried, tensors, timeout: of_sum(requests, ref, request_id, carried, tensors, timeout),
            )
        except MemoryError as error:
            raise InternalError("the aggregator has no memory left for a sum") from error
        finally:
            reservation.settle(0)

    async def _alone(self, accumulator: Aggregated, leaf: GradientLeaf) -> None:
        try:
            async with leaf.borrowed() as gradient:
                self.counts.alone += 1
                if accumulator.shards is not None and not leaf.request.HasField("request_id"):
                    # By which the servers hold it.
                    leaf.request.request_id.CopyFrom(self._new_id(leaf.request.accumulator))
                answer = await self._send(accumulator, [leaf], gradient.values, partial(alone, leaf.request))
            leaf.succeed(answer)
        except Exception as error:
            leaf.fail(error)
            if not isinstance(error, ServiceError):
                raise

    async def _send(
        self,
        accumulator: Aggregated,
        leaves: Sequence[GradientLeaf],
        values: Mapping[str, Value],
        request: _MakeRequest,
    ) -> Answer:
        if isinstance(leaves[0].request, messages_pb2.ApplyGradientRequest):
            message, _ = await self._sent(accumulator, leaves[0], "ApplyGradient", values, request, None, 0.0)
            return answer_of(message, None)
        message, average = await self._waited(accumulator, leaves, values, request)
        answer = answer_of(message, average)
        if isinstance(answer, Pulled) and average is not None:
            accumulator.latest.note(average)
        return answer

    async def _waited(
        self,
        accumulator: Aggregated,
        leaves: Sequence[GradientLeaf],
        values: Mapping[str, Value],
        request: _MakeRequest,
    ) -> tuple[Any, Average | None]:
        """Makes a call that waits upstream; makes it again while somebody waits here who came after it was made."""
        counts_once = len(leaves) > 1 or leaves[0].request.HasField("request_id")
        while True:
            timeout = _time_left(leaves)
            wait = math.inf if timeout is None else timeout
            sent = self._sent(accumulator, leaves[0], "PushPull", values, request, timeout, wait)
            sending = asyncio.ensure_future(sent)
            try:
                await _while_wanted(sending, leaves)
                return await sending
            except DeadlineExceededError:
                left = _time_left(leaves)
                if not counts_once or timeout is None or (left is not None and left <= _MARGIN_SECONDS):
                    raise
            finally:
                sending.cancel()

    async def _sent(
        self,
        accumulator: Aggregated,
        first: GradientLeaf,
        method: str,
        values: Mapping[str, Value],
        request: _MakeRequest,
        timeout: float | None,
        wait: float,
    ) -> tuple[Any, Average | None]:
        if accumulator.shards is not None:
            return await accumulator.shards.send(method, request({}, (), timeout), values, wait)
        return await self.link.send(
            method,
            first.request.accumulator,
            arrays_of(values),
            lambda tensors: request(values, tensors, timeout),
            wait,
        )

    def _new_id(self, ref: accumulator_pb2.AccumulatorRef) -> accumulator_pb2.RequestId:
        request_id = accumulator_pb2.RequestId()
        self._ids.write(request_id, self._ids.new_call(), (ref.container, ref.name))
        return request_id


class _MakeRequest(Protocol):
    def __call__(
        self, values: Mapping[str, Value], tensors: Sequence[tensor_pb2.Tensor], timeout: float | None, /
    ) -> GradientRequest:
        """Returns a request with values and the messages of their arrays; it waits for `timeout` seconds."""
        ...


async def _while_wanted(sending: asyncio.Future[tuple[Any, Average | None]], leaves: Sequence[GradientLeaf]) -> None:
    """Returns when a call is over; raises AbortedError when nobody has waited for it for a while."""
    was_left = False
    while not (await asyncio.wait([sending], timeout=_LEFT_SECONDS))[0]:
        is_left = all(each.is_left for each in leaves)
        if is_left and was_left:
            raise AbortedError("nobody waits for the answer any more")
        was_left = is_left


def _time_left(leaves: Sequence[GradientLeaf]) -> float | None:
    """Returns the seconds until the last caller stops waiting, and a little more; None for no limit."""
    now = asyncio.get_running_loop().time()
    longest = 0.0
    for each in leaves:
        if each.deadline is None:
            return None
        longest = max(longest, each.deadline - now)
    return longest + _MARGIN_SECONDS


def _alike(leaves: Sequence[GradientLeaf]) -> list[list[GradientLeaf]]:
    """Groups gradients by their shapes, which an accumulator may leave open; leaves out those that have an answer."""
    groups: dict[object, list[GradientLeaf]] = {}
    for each in leaves:
        if each.gradient is not None:
            shapes = tuple((name, value.shape) for name, value in sorted(each.gradient.dense.items()))
            groups.setdefault(shapes, []).append(each)
    return list(groups.values())


def _fail(leaves: Sequence[GradientLeaf], error: Exception) -> None:
    for each in leaves:
        each.fail(error)
