"""The operations on an accumulator that is sharded over several servers."""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from gradserve.calls.accumulators.components import Sent
from gradserve.calls.accumulators.contributions import Given
from gradserve.calls.accumulators.creation import delete, describe
from gradserve.calls.accumulators.sharding.shard import LOST_FIELD, PATIENCE_SECONDS, Shard
from gradserve.calls.accumulators.sharding.staging import EPOCH_FIELD, StagedFor, StagingWire, received_together
from gradserve.calls.accumulators.wire import AccumulatorWire, Awaiting
from gradserve.calls.combinators import all_ended, at_target
from gradserve.calls.exchange import Operation, Progress, Reply
from gradserve.results import AccumulatorInfo, Average, Value
from gradserve_protocol.errors import (
    AbortedError,
    GradserveError,
    NotFoundError,
)
from gradserve_protocol.messages import decode_duration
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2


class ShardedWire(StagingWire, AccumulatorWire):
    """The operations on one sharded accumulator.

    Its home answers everything, with gradients and averages that have no components. Each server gets its part of a
    gradient before that, and is asked for its part of an average after it.
    """

    def __init__(
        self,
        *args: Any,
        members: Mapping[int, str],
        creations: Mapping[int, Callable[[str], Operation[object]]],
        **kwargs: Any,
    ) -> None:
        """Takes the accumulator, and what each server has of it.

        Args:
            *args: See `StagingWire`.
            members: The servers that have something, as requests name them.
            creations: Creates the parts of those servers that are not the home, of an incarnation there.
            **kwargs: See `StagingWire`.
        """
        super().__init__(*args, **kwargs)
        self._creations = creations
        self._shards = {target: self._shard(target, members[target]) for target in self._parts.servers}

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
        others = yield from all_ended(*map(self._num_bytes, self._others))
        return replace(found, num_bytes=found.num_bytes + sum(others))

    def delete(self) -> Operation[bool]:
        """Deletes the accumulator: first at its home, so that nobody makes it again elsewhere."""
        ref = accumulator_pb2.AccumulatorRef()
        ref.CopyFrom(self.ref)
        ref.server_incarnation = ""
        reply = yield from at_target(self.target, delete(ref))
        yield from all_ended(
            *[at_target(each, delete(self._shards[each].ref, reply.home_incarnation)) for each in self._others]
        )
        self._deleted(ref.container, ref.name)
        return reply.deleted

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

    def _use(self, target: int) -> Operation[object]:
        return self._num_bytes(target)

    def _is_to_stage_again(self, error: AbortedError) -> Operation[bool]:
        if error.field != EPOCH_FIELD:
            return False
        yield from self.num_accumulated()  # which says in which epoch the gradient counts
        return True

    def _stage_at(
        self, target: int, given: Given, values: Mapping[str, Sent], staged: StagedFor, progress: Progress | None
    ) -> Operation[None]:
        shard = self._shards[target]
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
                self._stage_again, shard, given, StagedFor(average.parts.home_incarnation, self._session.epoch)
            )
        return shard.reduce(
            average,
            self._parts.num_bytes(shard.target),
            progress,
            again=again,
            patience=patience,
            in_place=in_place,
        )

    def _stage_again(self, shard: Shard, given: Given, staged: StagedFor) -> Operation[None]:
        values = self._parts.of_gradient(given.values)[shard.target]
        return self._stage_at(shard.target, given._replace(is_kept=False), values, staged, None)

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

    def _num_bytes(self, target: int) -> Operation[int]:
        try:
            info = yield from at_target(target, describe(self._shards[target].ref))
        except NotFoundError:
            return 0  # the server was started again, and gets it with the next gradient
        return info.num_bytes


def _is_stale(reply: Reply) -> bool:
    outcome: int = reply.message.outcome
    return outcome == accumulator_pb2.APPLY_OUTCOME_STALE
