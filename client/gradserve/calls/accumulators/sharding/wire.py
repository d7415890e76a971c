"""The operations on an accumulator that is sharded over several servers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from google.protobuf.message import Message

from gradserve.calls.accumulators.components import Sent, arrays_of
from gradserve.calls.accumulators.contributions import Given
from gradserve.calls.accumulators.creation import delete, describe
from gradserve.calls.accumulators.sharding.shard import LOST_FIELD, PATIENCE_SECONDS, Parts, Shard, Uncounted
from gradserve.calls.accumulators.wire import AccumulatorWire, Awaiting
from gradserve.calls.combinators import aimed_call, all_ended, at_target, together, with_beside
from gradserve.calls.exchange import CallbackError, Operation, Pause, Progress, Reply, Unary, Whole
from gradserve.results import AccumulatorInfo, Average, TensorHandle, Value
from gradserve_protocol.arrays import AnyArray
from gradserve_protocol.errors import (
    AbortedError,
    DeadlineExceededError,
    GradserveError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from gradserve_protocol.messages import decode_duration
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2

T = TypeVar("T")
_INTERVAL_SECONDS = 0.02
EPOCH_FIELD = "epoch"
"""The field of the error of a home that is in another epoch than the one in which a gradient was staged."""
_NOT_COUNTED_FIELD = "worker_id"
"""The field of the error of a push_pull in vain whose gradient does not count, as another one of its worker does."""
USES_PER_LEASE = 3
"""The number of times that a waiting call uses the parts of other servers within their idle lease."""


class PartOfTransfer:
    """Counts the bytes that are moved to or from one server; see `Progress`.

    Transfers run in threads of their own. So this tells nobody: `moved_together` does, in the thread of the call.

    Attributes:
        num_bytes: How many bytes have been moved.
        num_received: How many bytes the reply has; None before that is known.
    """

    def __init__(self) -> None:
        self.failure: CallbackError | None = None
        self.num_bytes = 0
        self.num_received: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None, /
    ) -> None:
        pass

    def sends(self, num_bytes: int, /) -> None:
        """Ignores the size: the sum over all servers is known before."""

    def receives(self, num_bytes: int, /) -> None:
        """Notes the size of the reply, and counts from zero again."""
        if self.num_received is None:
            self.num_received, self.num_bytes = num_bytes, 0

    def begin(self, overhead: int = 0, /) -> None:
        """Begins to count, without the bytes around the arrays."""
        self.num_bytes = -overhead

    def moved(self, num_bytes: int, /) -> None:
        """Counts bytes."""
        self.num_bytes += num_bytes

    def add(self, num_bytes: int, /) -> bool:
        """Counts bytes; there is never anything to tell."""
        self.num_bytes += num_bytes
        return False

    def tell(self) -> None:
        """Tells nobody."""

    def end(self) -> None:
        """Tells nobody."""


def sent_together(
    progress: Progress | None, num_bytes: int, operations: Sequence[Callable[[Progress | None], Operation[T]]]
) -> Operation[list[T]]:
    """Runs operations that send arrays, at the same time; returns their results.

    Args:
        progress: Told how far they are; None for nobody.
        num_bytes: How many bytes they send.
        operations: Begin the operations, each with its own part of the progress.
    """
    if progress is None:
        return (yield from _together([begin(None) for begin in operations]))
    progress.sends(num_bytes)
    return (yield from _reported(progress, operations, lambda parts: True))


def received_together(
    progress: Progress | None, operations: Sequence[Callable[[Progress | None], Operation[T]]]
) -> Operation[list[T]]:
    """Runs operations that receive arrays, at the same time; returns their results.

    Args:
        progress: Told how far they are, from when all know how much they receive; None for nobody.
        operations: Begin the operations, each with its own part of the progress.
    """
    if progress is None:
        return (yield from _together([begin(None) for begin in operations]))

    def is_known(parts: Sequence[PartOfTransfer]) -> bool:
        sizes = [each.num_received for each in parts if each.num_received is not None]
        if len(sizes) < len(parts):
            return False
        progress.receives(sum(sizes))
        return True

    return (yield from _reported(progress, operations, is_known))


def _reported(
    progress: Progress,
    operations: Sequence[Callable[[Progress | None], Operation[T]]],
    is_known: Callable[[Sequence[PartOfTransfer]], bool],
) -> Operation[list[T]]:
    parts = [PartOfTransfer() for _ in operations]
    left = set(range(len(operations)))

    def tell() -> None:
        if is_known(parts):
            progress.begin()
            progress.moved(sum([max(each.num_bytes, 0) for each in parts]))

    def ended(number: int) -> Operation[list[T]]:
        result = yield from operations[number](parts[number])
        left.discard(number)
        return [result]

    def reports() -> Operation[list[T]]:
        while left:
            yield Pause(_INTERVAL_SECONDS)
            tell()
        return []

    results = yield from together(*map(ended, range(len(operations))), reports())
    tell()
    return [each for result in results for each in result]


def _together(operations: Sequence[Operation[T]]) -> Operation[list[T]]:
    if len(operations) == 1:
        return [(yield from operations[0])]
    return (yield from together(*operations))


class _Staged(NamedTuple):
    """The incarnation of the accumulator at its home, and the epoch there, for which a gradient is staged."""

    incarnation: str
    epoch: int


class ShardedWire(AccumulatorWire):
    """The operations on one sharded accumulator.

    Its home answers everything, with gradients and averages that have no components. Each server gets its part of a
    gradient before that, and is asked for its part of an average after it.
    """

    def __init__(
        self,
        *args: Any,
        parts: Parts,
        members: Mapping[int, str],
        creations: Mapping[int, Callable[[str], Operation[object]]],
        uncounted: Uncounted,
        idle_lease: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes the accumulator, and what each server has of it.

        Args:
            *args: See `AccumulatorWire`.
            parts: What each server has.
            members: The servers that have something, as requests name them.
            creations: Creates the parts of those servers that are not the home, of an incarnation there.
            uncounted: What the client has staged that does not count.
            idle_lease: Seconds without use after which a server deletes its part; None: never.
            **kwargs: See `AccumulatorWire`.
        """
        super().__init__(*args, **kwargs)
        self._parts = parts
        self._creations = creations
        self._idle_lease = idle_lease
        self._shards = {target: self._shard(target, members[target]) for target in parts.servers}
        self._uncounted = uncounted

    def _read(
        self, request: messages_pb2.ReadAverageRequest, timeout: float, progress: Progress | None, *, in_place: bool
    ) -> Operation[Average]:
        # Its number keeps the average for it until all servers have computed it.
        with self._ids.open_calls.opened(self._key, self._ids.new_call, may_come_again=False) as call:
            self._address(request, call)
            return (yield from super()._read(request, timeout, progress, in_place=in_place))

    def info(self) -> Operation[AccumulatorInfo]:
        """Describes the accumulator, with the memory that it uses on all servers."""
        found = yield from super().info()
        others = yield from all_ended(*[self._num_bytes(each) for each in self._others])
        return replace(found, num_bytes=found.num_bytes + sum(others))

    def delete(self) -> Operation[bool]:
        """Deletes the accumulator: first at its home, so that nobody makes it again elsewhere."""
        ref = accumulator_pb2.AccumulatorRef()
        ref.CopyFrom(self.ref)
        ref.server_incarnation = ""
        reply = yield from at_target(self.target, delete(ref))
        yield from all_ended(
            *[at_target(each.target, delete(each.ref, reply.home_incarnation)) for each in self._others]
        )
        self._deleted(ref.container, ref.name)
        return reply.deleted

    def _unary(self, method: str, request: Message, wait: float = 0.0, *, in_place: bool = False) -> Unary:
        return aimed_call(self.target, super()._unary(method, request, wait, in_place=in_place))

    def _carried(self, values: Mapping[str, Sent]) -> Mapping[str, Sent]:
        if any(isinstance(value, TensorHandle) for value in values.values()):
            raise InvalidArgumentError(
                f"expected arrays, got the handle of a tensor: tensors are on server 0 of the cluster, and accumulator "
                f"{self.ref.name!r} is sharded over several servers",
                field="gradient",
            )
        return {}

    def _call_with_gradient(
        self,
        method: str,
        given: Given,
        _arrays: Sequence[AnyArray],
        request: Callable[[Sequence[tensor_pb2.Tensor]], Message],
        *,
        wait: float = 0.0,
        released: bool,
        in_place: bool = False,
        progress: Progress | None,
    ) -> Operation[Reply]:
        """Stages a gradient on all servers, and then makes the call that applies it."""
        while True:
            staged = yield from self._stage(given, progress)
            progress = None
            message: Any = request(())
            if message.accumulator.incarnation != staged.incarnation:
                continue
            message.epoch = staged.epoch
            try:
                reply = yield from self._applied(given, self._unary(method, message, wait, in_place=in_place))
            except AbortedError as error:
                if error.field != EPOCH_FIELD:
                    raise
                yield from self.num_accumulated()  # which says in which epoch the gradient counts
            except DeadlineExceededError as error:
                if error.field == _NOT_COUNTED_FIELD:
                    self._uncounted.withdraw(self._key, self._shards, given.call)
                raise
            else:
                if reply.message.outcome != accumulator_pb2.APPLY_OUTCOME_ACCEPTED:
                    self._uncounted.withdraw(self._key, self._shards, given.call)
                asking = self._uncounted.take_asking(self._key)
                if asking:
                    yield from self._forget_uncounted(asking)
                return reply

    def _applied(self, given: Given, call: Unary) -> Operation[Reply]:
        message: Any = call.request

        def renewed() -> Operation[None]:
            if call.renewal is not None:
                yield from call.renewal()
            # The accumulator may have been created again: then nothing is staged for it.
            message.epoch = (yield from self._stage(given, None)).epoch

        return self._waited(Whole(call._replace(renewal=renewed)))

    def _forget_uncounted(self, targets: Collection[int]) -> Operation[None]:
        """Ends the epoch, and tries to have servers forget what was staged in it and does not count."""
        asked = messages_pb2.EndEpochRequest(accumulator=self.ref)
        with suppress(GradserveError):
            answer: messages_pb2.EndEpochResponse = yield self._unary("EndEpoch", asked)
            incarnation = asked.accumulator.incarnation
            self._learn(incarnation, answer.epoch)
            yield from all_ended(*[self._shards[target].forget(incarnation, answer) for target in targets])

    def _learn(self, incarnation: str, epoch: int) -> None:
        if incarnation == self.ref.incarnation:
            self._session.epoch = max(self._session.epoch, epoch)

    def _waited(self, call: Whole) -> Operation[Reply]:
        """Makes a call that may wait at the home, and keeps the parts of the other servers in use until it ends."""
        waiting = super()._waited(call)
        if self._idle_lease is None or not call.call.wait:
            return waiting
        return with_beside(waiting, self._using_others(self._idle_lease / USES_PER_LEASE))

    def _using_others(self, pause: float) -> Operation[None]:
        while True:
            yield Pause(pause)
            for each in self._others:
                try:
                    yield from self._num_bytes(each)
                except GradserveError:
                    continue  # it has no lease while it cannot be reached, and begins a new one after that

    def _stage(self, given: Given, progress: Progress | None) -> Operation[_Staged]:
        """Stages a gradient on all servers; returns what it is staged for."""
        parts = self._parts.of_gradient(given.values)
        num_bytes = sum(array.nbytes for values in parts.values() for array in arrays_of(values)[0])
        is_full = False
        while True:
            staged = _Staged(self.ref.incarnation, self._session.epoch)
            stage = [partial(self._staged, each, given, parts[each.target], staged) for each in self._shards.values()]
            try:
                yield from sent_together(progress, num_bytes, stage)
            except ResourceExhaustedError:
                if is_full:
                    raise
                is_full = True  # perhaps of gradients that do not count
                yield from self._forget_uncounted(self._shards)
                continue
            if self.ref.incarnation == staged.incarnation:
                return staged

    def _staged(
        self, shard: Shard, given: Given, values: Mapping[str, Sent], staged: _Staged, progress: Progress | None
    ) -> Operation[None]:
        """Stages what one server gets of a gradient."""
        staging = messages_pb2.StageGradientRequest(
            home_incarnation=staged.incarnation,
            local_step=given.local_step,
            weight=given.weight,
            can_stage_again=given.is_kept,
            release_handles=True,
            epoch=staged.epoch,
        )
        staging.request_id.client_id, staging.request_id.sequence = given.call
        self._uncounted.address(staging, self._key, shard.target)
        try:
            reply = yield from shard.stage(staging, values, progress)
        except GradserveError as error:
            self._parts.name_field(shard.target, error)
            raise
        if reply is not None:
            self._uncounted.answered(staging, self._key, shard.target, asks=reply.has_old_gradients)

    def _receive_average(
        self,
        request: Awaiting,
        reply: Reply,
        progress: Progress | None,
        *,
        in_place: bool,
        given: Given | None = None,
    ) -> Operation[Average]:
        try:
            return (yield from super()._receive_average(request, reply, progress, in_place=in_place, given=given))
        except AbortedError as error:
            if error.field == LOST_FIELD and given is not None and _is_stale(reply):
                return Average({}, None, reply.message.global_step, 0, 0.0, ())
            raise

    def _receive_values(
        self,
        request: Awaiting,
        reply: Reply,
        progress: Progress | None,
        *,
        in_place: bool,
        given: Given | None,
    ) -> Operation[dict[str, Value]]:
        """Has all servers reduce the gradients that the home has named, and puts the average together."""
        parts = reply.message.average.parts
        self._learn(parts.home_incarnation, parts.epoch)
        timeout = decode_duration(request, "timeout")
        patience = PATIENCE_SECONDS if timeout is None else min(timeout, PATIENCE_SECONDS)
        if given is not None and _is_stale(reply):
            given = None  # it is not in the round
        reduce = partial(self._reduced, reply.message.average, patience, given, in_place=in_place)
        received = yield from received_together(progress, [partial(reduce, each) for each in self._shards.values()])
        return self._parts.put_together(dict(zip(self._shards, received, strict=True)), read_only=in_place)

    def _reduced(
        self,
        average: accumulator_pb2.Average,
        patience: float,
        given: Given | None,
        shard: Shard,
        progress: Progress | None,
        *,
        in_place: bool,
    ) -> Operation[dict[str, Value]]:
        again = None
        if given is not None:
            again = partial(
                self._stage_again, shard, given, _Staged(average.parts.home_incarnation, self._session.epoch)
            )
        return shard.reduce(
            average,
            self._parts.num_bytes(shard.target),
            progress,
            again=again,
            patience=patience,
            in_place=in_place,
        )

    def _stage_again(self, shard: Shard, given: Given, staged: _Staged) -> Operation[None]:
        values = self._parts.of_gradient(given.values)[shard.target]
        return self._staged(shard, given._replace(is_kept=False), values, staged, None)

    @property
    def _others(self) -> list[Shard]:
        """The shards on other servers than the home."""
        return [each for each in self._shards.values() if each.target != self.target]

    def _shard(self, target: int, member: str) -> Shard:
        ref = accumulator_pb2.AccumulatorRef(container=self.ref.container, name=self.ref.name, member=member)
        return Shard(ref, target, self._is_there, partial(self._restore, target))

    def _is_there(self, incarnation: str) -> Operation[bool]:
        """Returns whether the home still has an incarnation; if it was started again without, it has another one."""
        yield from self.num_accumulated()
        return self.ref.incarnation == incarnation

    def _restore(self, target: int, incarnation: str) -> Operation[None]:
        """Creates the part of a server again, after it was started again without it."""
        if target in self._creations:
            yield from self._creations[target](incarnation)

    def _num_bytes(self, shard: Shard) -> Operation[int]:
        try:
            info = yield from at_target(shard.target, describe(shard.ref))
        except NotFoundError:
            return 0  # the server was started again, and gets it with the next gradient
        return info.num_bytes


def _is_stale(reply: Reply) -> bool:
    outcome: int = reply.message.outcome
    return outcome == accumulator_pb2.APPLY_OUTCOME_STALE
