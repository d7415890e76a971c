"""An accumulator that is sharded over the servers upstream."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from gradserve.calls.accumulators.components import Component, Sent
from gradserve.calls.accumulators.creation import create, describe
from gradserve.calls.accumulators.sharding.shard import (
    LOST_FIELD,
    PATIENCE_SECONDS,
    Parts,
    Shard,
    Step,
    add_plan,
    is_sharded,
    plan_in,
)
from gradserve.calls.accumulators.sharding.staging import EPOCH_FIELD
from gradserve.calls.combinators import all_ended, at_target, together
from gradserve.calls.exchange import Operation
from gradserve.calls.identity import RequestIds
from gradserve.calls.server import Cluster
from gradserve.results import IndexedSlices
from gradserve.results import Value as Received
from gradserve_protocol.errors import AbortedError, GradserveError, NotFoundError
from gradserve_protocol.placement import plan_of
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2
from gradserve_server.accumulators.gradient import Average, Packed, SparseSlices, Value
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.devices.compute import Compute
from gradserve_server.rpc.accumulators.requests import GradientRequest, decode_accumulator_spec
from gradserve_server.rpc.upstream.messages import average_of, served
from gradserve_server.rpc.upstream.sharded import UpstreamSharded

if TYPE_CHECKING:
    from gradserve_server.rpc.upstream.link import UpstreamLink


class UpstreamShards(UpstreamSharded):
    """An accumulator's shards on the servers upstream, and the calls on them: those of a client of all servers."""

    SERVICE = "AccumulatorService"

    def __init__(
        self, info: accumulator_pb2.AccumulatorInfo, spec: AccumulatorSpec, link: UpstreamLink, compute: Compute
    ) -> None:
        """Takes what the accumulator's home says of it, the connection, and what runs large work.

        Raises:
            InvalidArgumentError: It is sharded over other servers.
        """
        ref = info.accumulator
        parts = Parts(_components_of(spec), plan_in(info.spec))
        super().__init__(info, ref, parts, link, compute, kind="accumulator")
        self._key = (ref.container, ref.name)
        self._reads = RequestIds(uuid.uuid4().hex)
        self._names = [each.name for each in spec.components]
        named = accumulator_pb2.AccumulatorRef(container=ref.container, name=ref.name)
        self._creation = messages_pb2.CreateAccumulatorRequest(
            accumulator=named, spec=info.spec, lifetime=self._lifetime, home_incarnation=self._incarnation
        )

    async def create(self) -> None:
        """Creates the accumulator on the servers that have something of it, besides its home.

        Raises:
            AbortedError: It was deleted in the meantime; see `is_of_earlier`.
            ServiceError: See `UpstreamLink.call`.
        """

        def operation() -> Operation[object]:
            return (yield from together(*[self._created(target) for target in self._others]))

        await self._link.run(operation())

    async def num_bytes_elsewhere(self) -> int:
        """Returns the memory that the accumulator uses on the servers that are not its home.

        Raises:
            ServiceError: See `UpstreamLink.call`.
        """

        def operation() -> Operation[list[int]]:
            return (yield from all_ended(*[self._num_bytes(target) for target in self._others]))

        return sum(await self._link.run(operation()))

    async def send(
        self, method: str, request: Any, values: Mapping[str, Value | Packed], wait: float
    ) -> tuple[Any, Average | None]:
        """Brings each server its part of a gradient, and then makes the call that applies it.

        Args:
            method: The method of AccumulatorService.
            request: The request, with a request_id and without the gradient.
            values: The gradient, which nobody changes until this returns, and of which nothing is packed.
            wait: Seconds that the home may wait for others; math.inf for no limit.

        Returns:
            The response, and its average if it has one that can be computed.

        Raises:
            AbortedError: Servers have lost gradients of the round, and did not get all of them again in time.
            ServiceError: See `UpstreamLink.call`.
        """

        def operation() -> Operation[tuple[Any, Mapping[int, Mapping[str, Received]] | None]]:
            ref = request.accumulator
            yield from self._address(ref)
            plain = cast("Mapping[str, Value]", values)
            parts = self._parts.of_gradient({name: _sent(value) for name, value in plain.items()})
            shards = yield from self._shards(ref)
            message: Any = None
            again: dict[int, Step] = {}
            while message is None:
                staging = yield from self._staging(request)
                again = {each.target: partial(self._stage, each, staging, parts[each.target]) for each in shards}
                yield from together(*[stage() for stage in again.values()])
                request.epoch = staging.epoch
                try:
                    message = (yield from self._asked(method, request, wait)).message
                except AbortedError as error:
                    if error.field != EPOCH_FIELD:
                        raise
                    asked = messages_pb2.GetNumAccumulatedRequest(accumulator=ref)
                    self._epoch = (yield self._call("GetNumAccumulated", asked)).epoch
            yield from self._forget_uncounted(shards, ref)
            if not isinstance(message, messages_pb2.PushPullResponse) or not message.HasField("average"):
                return message, None
            is_stale = message.outcome == accumulator_pb2.APPLY_OUTCOME_STALE
            try:
                return message, (yield from self._reduced(shards, message.average, {} if is_stale else again, wait))
            except AbortedError as error:
                if is_stale and error.field == LOST_FIELD:
                    return message, None
                raise

        message, received = await self._link.run(operation())
        return message, None if received is None else await self._average(message.average, received)

    async def wait(self, method: str, request: Any, wait: float) -> tuple[Any, Average]:
        """Makes a call that waits for an average; see `UpstreamLink.wait`.

        Raises:
            AbortedError: Servers have lost gradients of the round, and did not get all of them again in time.
            ServiceError: See `UpstreamLink.call`.
        """

        def operation() -> Operation[tuple[Any, Mapping[int, Mapping[str, Received]]]]:
            yield from self._address(request.accumulator)
            reply = yield from self._asked(method, request, wait)
            shards = yield from self._shards(request.accumulator)
            return reply.message, (yield from self._reduced(shards, reply.message.average, {}, wait))

        if not isinstance(request, messages_pb2.ReadAverageRequest):
            message, received = await self._link.run(operation())
            return message, await self._average(message.average, received)
        # Its number keeps the average until all servers have computed it.
        with self._reads.open_calls.opened(self._key, self._reads.new_call, may_come_again=False) as call:
            self._reads.write(request.request_id, call, self._key)
            message, received = await self._link.run(operation())
        return message, await self._average(message.average, received)

    def _address(self, ref: accumulator_pb2.AccumulatorRef) -> Operation[None]:
        """Makes a name that of this very accumulator at its home."""
        ref.incarnation = self._incarnation
        ref.member = yield from self._cluster.member(self._home)

    def _shards(self, ref: accumulator_pb2.AccumulatorRef) -> Operation[list[Shard]]:
        """Returns what each server has, for a call that names the accumulator so at its home."""
        shards: list[Shard] = []
        for target in self._parts.servers:
            there = accumulator_pb2.AccumulatorRef(container=ref.container, name=ref.name)
            there.member = yield from self._cluster.member(target)
            shards.append(Shard(there, target, partial(self._is_there, ref), partial(self._restore, target)))
        return shards

    def _is_there(self, ref: accumulator_pb2.AccumulatorRef, incarnation: str) -> Operation[bool]:
        """Asks the home whether it still has an incarnation."""
        # The caller has to learn that the accumulator is gone, or that its home was restarted.
        asked = messages_pb2.GetNumAccumulatedRequest(accumulator=ref)
        yield self._call("GetNumAccumulated", asked)
        return incarnation == self._incarnation

    def _restore(self, target: int, _incarnation: str) -> Operation[None]:
        """Creates what a server has again, after it was started again without it."""
        if target != self._home:
            yield from self._created(target)

    def _created(self, target: int) -> Operation[object]:
        request = messages_pb2.CreateAccumulatorRequest()
        request.CopyFrom(self._creation)
        request.accumulator.member = yield from self._cluster.member(target)
        return (yield from at_target(target, create(request)))

    def _use(self, target: int) -> Operation[object]:
        return self._num_bytes(target)

    def _num_bytes(self, target: int) -> Operation[int]:
        ref = accumulator_pb2.AccumulatorRef()
        ref.CopyFrom(self._creation.accumulator)
        ref.member = yield from self._cluster.member(target)
        try:
            return (yield from at_target(target, describe(ref))).num_bytes
        except NotFoundError:
            return 0  # the server was started again, and gets it with the next gradient

    def _staging(self, request: GradientRequest) -> Operation[messages_pb2.StageGradientRequest]:
        """Returns the request that stages a gradient, without the accumulator and the gradient."""
        local_step = request.local_step
        if getattr(request, "accepted_before", False):
            # Its round may be a later one, and servers forget what is older than that.
            asked = messages_pb2.GetAccumulatorRequest(accumulator=request.accumulator)
            response = yield self._call("GetAccumulator", asked)
            local_step = max(local_step, response.info.global_step)
        staging = messages_pb2.StageGradientRequest(
            home_incarnation=self._incarnation,
            local_step=local_step,
            is_sum=bool(request.sum_of),
            release_handles=True,
            epoch=self._epoch,
        )
        # Servers hold it, and do not add it to others at once: its workers cannot stage it again without this server.
        staging.request_id.client_id = request.request_id.client_id
        staging.request_id.sequence = request.request_id.sequence
        return staging

    def _stage(
        self, shard: Shard, staging: messages_pb2.StageGradientRequest, values: Mapping[str, Sent]
    ) -> Operation[None]:
        try:
            reply = yield from shard.stage(staging, values)
        except GradserveError as error:
            self._parts.name_field(shard.target, error)
            raise
        if reply is not None:
            self._uncounted.answered(staging, self._key, shard.target, asks=reply.has_old_gradients)

    def _forget_uncounted(self, shards: Sequence[Shard], ref: accumulator_pb2.AccumulatorRef) -> Operation[None]:
        """Has servers forget gradients of clients that have ended, if they have asked for that."""
        asking = self._uncounted.take_asking(self._key)
        if asking:
            with suppress(GradserveError):  # they will ask again
                asked = messages_pb2.EndEpochRequest(accumulator=ref)
                answer: messages_pb2.EndEpochResponse = yield self._call("EndEpoch", asked)
                self._epoch = answer.epoch
                of = [each for each in shards if each.target in asking]
                yield from all_ended(*[each.forget(self._incarnation, answer) for each in of])

    def _reduced(
        self, shards: Sequence[Shard], average: accumulator_pb2.Average, again: Mapping[int, Step], wait: float
    ) -> Operation[Mapping[int, Mapping[str, Received]]]:
        """Has all servers reduce the gradients that the home has named."""
        received = yield from together(
            *[
                each.reduce(
                    average,
                    self._parts.num_bytes(each.target),
                    again=again.get(each.target),
                    patience=min(wait, PATIENCE_SECONDS),
                    in_place=True,
                )
                for each in shards
            ]
        )
        return {each.target: values for each, values in zip(shards, received, strict=True)}

    async def _average(
        self, message: accumulator_pb2.Average, received: Mapping[int, Mapping[str, Received]]
    ) -> Average:
        num_bytes = sum([self._parts.num_bytes(target) for target in received])
        put_together = partial(self._parts.put_together, read_only=True)
        whole = await self._compute.run(num_bytes, put_together, received)
        return average_of(message, {name: _value(whole[name]) for name in self._names})


def shard_if_wanted(request: messages_pb2.CreateAccumulatorRequest, wanted: bool | None, cluster: Cluster) -> None:
    """Makes the request for a whole accumulator one for a sharded one by the rule of clients.

    Args:
        request: The request.
        wanted: What the client here wants; None for what is best.
        cluster: The servers upstream, which are several.

    Raises:
        InvalidArgumentError: It is wanted, and not possible; or the spec is not valid.
    """
    components = _components_of(decode_accumulator_spec(request.spec))
    try:
        if not is_sharded(wanted, components, request.spec.device or None):
            return
    except GradserveError as error:
        raise served(error) from error
    home = cluster.home_of(request.accumulator.container, request.accumulator.name)
    add_plan(request.spec, plan_of(components, home, cluster.size), cluster.size)


def _components_of(spec: AccumulatorSpec) -> list[Component]:
    return [Component(each.name, each.dtype, each.shape.dims, is_sparse=each.is_sparse) for each in spec.components]


def _sent(value: Value) -> Sent:
    return IndexedSlices(value.values, value.indices, value.dense_shape) if isinstance(value, SparseSlices) else value


def _value(received: Received) -> Value:
    if isinstance(received, IndexedSlices):
        return SparseSlices(received.indices, received.values, received.dense_shape)
    return received
