"""The way of gradients through an aggregator: they arrive, are held, and go on alone or in the sum of several."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from gradserve.calls.identity import RequestIds
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2
from gradserve_server.accumulators.gradient import Average, Contribution, Gradient, OpenGradient, Packed, Value
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.incoming import GradientReceiver, IncomingGradient, check_contribution
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.accumulators.sums.checking import Check
from gradserve_server.accumulators.sums.packed import WORK, check_packed
from gradserve_server.devices.compute import PIECE_BYTES
from gradserve_server.errors import (
    AbortedError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    ServiceError,
)
from gradserve_server.parameters.queue import OVERDUE_FIELD
from gradserve_server.resources.budget import Budget, Purpose
from gradserve_server.rpc.upstream.aggregated import Aggregated, GradientLeaf
from gradserve_server.rpc.upstream.messages import (
    Answer,
    Contributed,
    Pulled,
    Ref,
    alone,
    answer_of,
    arrays_of,
    batch_key,
    method_of,
    of_sum,
    ref_of,
    waits_for_round,
    without_tensors,
)
from gradserve_server.runtime.event_loop import BackgroundTasks
from gradserve_server.security.identity import Identity
from gradserve_server.upstream.batches import Batches, Counts, ForwardingRule, Leaf, in_order, sum_bytes, summed

if TYPE_CHECKING:
    from gradserve_server.rpc.upstream.link import UpstreamLink


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

    def __init__(
        self,
        link: UpstreamLink,
        place: Place,
        memory: Budget,
        ids: RequestIds,
        rule: ForwardingRule,
        counts: Counts,
    ) -> None:
        self.link = link
        self.place = place
        """The memory in which sums are computed."""
        self.memory = memory
        """The budget of sums while they are forwarded."""
        self.counts = counts
        self.tasks = BackgroundTasks()
        self.rule = rule
        self._ids = ids

    def new_batches(self, resource: Aggregated) -> Batches[GradientLeaf]:
        """Returns the batches of an accumulator or of parameters."""
        return Batches(self.rule, partial(self.forward, resource))

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
                each.succeed(accumulator.share(each, answer))
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
                reservation.grow(sum_bytes(accumulator.spec, gradients))
                given = [(each.contribution, gradient) for each, gradient in zip(ordered, gradients, strict=True)]
                num_bytes = sum([gradient.nbytes for gradient in gradients])
                values = await self.place.compute.run(num_bytes, summed, accumulator.spec, self.place, given)
                del given, gradients
            for each in ordered:
                each.added_up()
            request_id = self._new_id(ref_of(ordered[0].request))
            requests = [each.request for each in ordered]
            self.counts.sums += 1
            return await self._send(
                accumulator,
                ordered,
                values,
                lambda carried, tensors, timeout: of_sum(requests, request_id, carried, tensors, timeout),
            )
        except MemoryError as error:
            raise InternalError("the aggregator has no memory left for a sum") from error
        finally:
            reservation.settle(0)

    async def _alone(self, accumulator: Aggregated, leaf: GradientLeaf) -> None:
        try:
            async with leaf.borrowed() as gradient:
                self.counts.alone += 1
                if accumulator.send_staged is not None and not leaf.request.HasField("request_id"):
                    # By which the servers hold it.
                    leaf.request.request_id.CopyFrom(self._new_id(ref_of(leaf.request)))
                async with self._to_send(accumulator, gradient) as values:
                    send = partial(self._send, accumulator, [leaf], values)
                    whole = partial(alone, leaf.request)
                    sent = partial(whole, without_values=True) if accumulator.leaves_values(leaf) else whole
                    answer = await accumulator.complete(leaf, await send(sent), lambda: send(whole))
            leaf.succeed(answer)
        except Exception as error:
            leaf.fail(error)
            if not isinstance(error, ServiceError):
                raise

    @asynccontextmanager
    async def _to_send(
        self, accumulator: Aggregated, gradient: Gradient
    ) -> AsyncIterator[Mapping[str, Value | Packed]]:
        """Gives what is sent of a gradient that goes alone to a block.

        A packed one is sent as it is, but not in parts: its blocks are those of whole components.
        """
        if accumulator.send_staged is None or not gradient.packed:
            yield {**gradient.values, **gradient.packed}
            return
        reservation = self.memory.reserve(purpose=Purpose.COMPUTING)
        try:
            reservation.grow(sum_bytes(accumulator.spec, [gradient]))
            given = [(Contribution(), gradient)]
            yield await self.place.compute.run(gradient.nbytes, summed, accumulator.spec, self.place, given)
        except MemoryError as error:
            raise InternalError("the aggregator has no memory left for an update") from error
        finally:
            reservation.settle(0)

    async def _send(
        self,
        accumulator: Aggregated,
        leaves: Sequence[GradientLeaf],
        values: Mapping[str, Value | Packed],
        request: _MakeRequest,
    ) -> Answer:
        if not waits_for_round(leaves[0].request):
            message, _ = await self._sent(accumulator, leaves[0], values, request, None, 0.0)
            return answer_of(message, None)
        message, average = await self._waited(accumulator, leaves, values, request)
        answer = answer_of(message, average)
        if isinstance(answer, Pulled) and average is not None and average.values:
            accumulator.latest.note(average)
        return answer

    async def _waited(
        self,
        accumulator: Aggregated,
        leaves: Sequence[GradientLeaf],
        values: Mapping[str, Value | Packed],
        request: _MakeRequest,
    ) -> tuple[Any, Average | None]:
        """Makes a call that waits upstream; makes it again while somebody waits here who came after it was made."""
        counts_once = len(leaves) > 1 or leaves[0].request.HasField("request_id")
        while True:
            timeout = _time_left(leaves)
            wait = math.inf if timeout is None else timeout
            sent = self._sent(accumulator, leaves[0], values, request, timeout, wait)
            sending = asyncio.ensure_future(sent)
            try:
                await _while_wanted(sending, leaves)
                return await sending
            except DeadlineExceededError as error:
                if error.field == OVERDUE_FIELD:
                    raise  # the round has ended the wait of all, however long they would wait
                left = _time_left(leaves)
                if not counts_once or timeout is None or (left is not None and left <= _MARGIN_SECONDS):
                    raise
            finally:
                sending.cancel()

    async def _sent(
        self,
        accumulator: Aggregated,
        first: GradientLeaf,
        values: Mapping[str, Value | Packed],
        request: _MakeRequest,
        timeout: float | None,
        wait: float,
    ) -> tuple[Any, Average | None]:
        if accumulator.send_staged is not None:
            return await accumulator.send_staged(method_of(first.request), request({}, (), timeout), values, wait)
        return await self.link.send(
            method_of(first.request),
            ref_of(first.request),
            arrays_of(values),
            lambda tensors: request(values, tensors, timeout),
            wait,
        )

    def _new_id(self, ref: Ref) -> accumulator_pb2.RequestId:
        request_id = accumulator_pb2.RequestId()
        self._ids.write(request_id, self._ids.new_call(), (ref.container, ref.name))
        return request_id


class _MakeRequest(Protocol):
    def __call__(
        self, values: Mapping[str, Value | Packed], tensors: Sequence[tensor_pb2.Tensor], timeout: float | None, /
    ) -> Contributed:
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
            gradient = each.gradient
            dense = {name: value.shape for name, value in gradient.dense.items()}
            dense |= {name: value.shape for name, value in gradient.packed.items()}
            shapes = tuple(sorted(dense.items()))
            groups.setdefault(shapes, []).append(each)
    return list(groups.values())


def _fail(leaves: Sequence[GradientLeaf], error: Exception) -> None:
    for each in leaves:
        each.fail(error)


class Arrivals:
    """Takes gradients from the calls of workers to the batches, and the answers back. Used on the event loop only."""

    def __init__(self, forwarding: Forwarding, receiver: GradientReceiver) -> None:
        self._forwarding = forwarding
        self._place = forwarding.place
        self._compute = forwarding.place.compute
        self._receiver = receiver

    async def answered(
        self,
        resource: Aggregated,
        spec: AccumulatorSpec,
        request: Contributed,
        decoded: tuple[RequestId | None, Contribution, IncomingGradient],
        user: Identity,
        timeout: float | None,
    ) -> tuple[Answer, bool]:
        """Passes a gradient on; returns the answer, and whether an earlier call with the same id gets the same one.

        Args:
            resource: Where it belongs.
            spec: The spec of a gradient with its components.
            request: The request that brings it.
            decoded: The id of its call, its step, weight and sender, and the gradient.
            user: The caller.
            timeout: Seconds to wait for the answer; None for no limit.

        Raises:
            TimeoutError: There was no answer in time.
            ServiceError: The gradient is not valid here, or the error of the server upstream.
        """
        request_id, contribution, given = decoded
        check_contribution(resource.name, resource.spec, contribution)
        self._forwarding.counts.gradients += contribution.num_gradients
        opening = await self._receiver.receive(spec, self._place, given)
        leaf = resource.under_way.find(request_id)
        is_repeated = leaf is not None
        if leaf is None:
            leaf = Leaf(without_tensors(request, user), contribution)
            resource.begin(request_id, leaf)
        leaf.bring()
        self._forwarding.tasks.begin(self._bring(resource, spec, leaf, opening, is_repeated=is_repeated))
        return await leaf.wait(timeout), is_repeated

    async def _bring(
        self,
        resource: Aggregated,
        spec: AccumulatorSpec,
        leaf: GradientLeaf,
        opening: OpenGradient,
        *,
        is_repeated: bool,
    ) -> None:
        """Holds a gradient open while it is needed, and forwards it unless an earlier call has done so."""

        async def lend(gradient: Gradient) -> None:
            dense = spec.only(gradient.values) if gradient.packed else spec
            check = Check.of(dense, gradient, self._place)
            work = max(check.work, PIECE_BYTES * len(spec.components))
            checked = await self._compute.run(work, check.checked, None)
            if gradient.packed:
                await self._compute.run(WORK * gradient.nbytes, check_packed, spec, gradient.packed)
                checked = replace(checked, packed=gradient.packed)
            returned = leaf.lend(checked)
            if not is_repeated:
                self._pass_on(resource, leaf)
            await returned

        try:
            await opening(lend)
        except Exception as error:
            if is_repeated:
                if not isinstance(error, ServiceError | MemoryError):
                    raise
            elif isinstance(error, MemoryError):
                leaf.fail(
                    ResourceExhaustedError("the aggregator has no memory left for this gradient", code="GS_NO_MEMORY")
                )
            else:
                leaf.fail(error)
                if not isinstance(error, ServiceError):
                    raise
        finally:
            leaf.brought()

    def _pass_on(self, resource: Aggregated, leaf: GradientLeaf) -> None:
        if resource.may_add(leaf):
            resource.batches.add(batch_key(leaf.request), leaf, leaf.contribution.num_gradients)
        else:
            self._forwarding.forward(resource, [leaf])
