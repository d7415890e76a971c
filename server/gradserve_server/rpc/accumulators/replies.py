"""Encodes replies of AccumulatorService: outcomes, averages, and descriptions of accumulators."""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from gradserve_protocol.tensors import Contents, WithContents, encode_message, to_data_type
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2
from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.gradient import Average, RoundParts, SparseSlices
from gradserve_server.accumulators.rounds import AccumulatorState, Applied, Outcome
from gradserve_server.accumulators.spec import (
    ComponentSpec,
    Layout,
    Reduction,
)
from gradserve_server.devices.compute import PIECE_BYTES, Compute
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.rpc.boundary.chain import Codec
from gradserve_server.rpc.boundary.fields import encode_durability, encode_idle_lease
from gradserve_server.rpc.boundary.messages import PARTS_AT_ONCE, Serialized, repeated, within
from gradserve_server.rpc.tensors.messages import each_delivered
from gradserve_server.tensors.delivery import Delivery

# Outcomes and averages

_OUTCOMES = {
    Outcome.ACCEPTED: accumulator_pb2.APPLY_OUTCOME_ACCEPTED,
    Outcome.STALE: accumulator_pb2.APPLY_OUTCOME_STALE,
    Outcome.ALREADY_COUNTED: accumulator_pb2.APPLY_OUTCOME_ALREADY_COUNTED,
}


_Response: TypeAlias = (
    messages_pb2.TakeGradientResponse
    | messages_pb2.ReadAverageResponse
    | messages_pb2.PushPullResponse
    | messages_pb2.ReduceGradientsResponse
)


def encode_applied(applied: Applied, *, duplicate: bool, num_rounds: int) -> messages_pb2.ApplyGradientResponse:
    """Returns the response of an apply, when `num_rounds` rounds have ended."""
    is_in_round = applied.outcome is Outcome.ACCEPTED and applied.round is not None
    return messages_pb2.ApplyGradientResponse(
        outcome=_OUTCOMES[applied.outcome],
        duplicate=duplicate,
        global_step=applied.global_step,
        num_accumulated=applied.num_accumulated,
        round=applied.round.number + 1 if is_in_round and applied.round is not None else 0,
        num_rounds=num_rounds,
    )


@dataclass
class ContentsOfAverage(Contents):
    """The contents of an average.

    Attributes:
        average: The average, whose arrays never change.
    """

    is_kept: ClassVar[bool] = True
    average: Average | None = None


async def encode_taken(average: Average, delivery: Delivery, compute: Compute, *, duplicate: bool) -> WithContents:
    """Delivers the average of a take; returns the response."""
    response = messages_pb2.TakeGradientResponse(duplicate=duplicate)
    return await _with_average(response, average, delivery, Contents(), compute)


async def encode_read(average: Average, delivery: Delivery, compute: Compute) -> WithContents:
    """Delivers an average that was read; returns the response."""
    contents = ContentsOfAverage(average=average)
    return await _with_average(messages_pb2.ReadAverageResponse(), average, delivery, contents, compute)


async def encode_reduced(average: Average, delivery: Delivery, compute: Compute) -> WithContents:
    """Delivers what this server has of an average; returns the response."""
    contents = ContentsOfAverage(average=average)
    return await _with_average(messages_pb2.ReduceGradientsResponse(), average, delivery, contents, compute)


async def encode_pulled(
    applied: Applied,
    average: Average | None,
    delivery: Delivery,
    compute: Compute,
    *,
    duplicate: bool,
    global_step: int,
) -> WithContents:
    """Delivers the average of a push_pull; returns the response.

    Args:
        applied: The outcome of the gradient.
        average: The average, if there is one.
        delivery: Delivers the average.
        compute: Runs what takes long for many components.
        duplicate: Whether the call was a duplicate.
        global_step: The current step, for a gradient that is in no round.
    """
    contents = ContentsOfAverage(average=average)
    if average is not None and applied.outcome is not Outcome.STALE:
        global_step = average.step
    response = messages_pb2.PushPullResponse(
        outcome=_OUTCOMES[applied.outcome],
        duplicate=duplicate,
        global_step=global_step,
    )
    if average is None:
        return WithContents(response, contents)
    return await _with_average(response, average, delivery, contents, compute)


async def _with_average(
    response: _Response, average: Average, delivery: Delivery, contents: Contents, compute: Compute
) -> WithContents:
    """Delivers an average; returns a response with it."""
    # Shared, because the history or other callers have the same arrays.
    are_few = len(average.values) <= PARTS_AT_ONCE
    if average.host_copy is not None and delivery.keeps(average.nbytes):
        await average.host_copy.reserve(delivery.room.device, delivery.room.owner)
    else:
        average = await average.on_host()
    arrays = average.arrays if are_few else await compute.run_in_thread(lambda: average.arrays)
    delivered = await delivery.deliver_many(arrays, shared=True)
    if len(delivered) <= PARTS_AT_ONCE:
        parts = _components(average, each_delivered(delivered, contents))
        await compute.run(PIECE_BYTES * len(delivered), _add_average, response, average, parts)
        return WithContents(response, contents)
    # With contents beside it, a message for gRPC could not be serialized in parts.
    parts = _components(average, each_delivered(delivered, contents, beside=delivery.is_attached))
    return WithContents(await compute.run_in_thread(_serialized, response, average, parts), contents)


def _add_average(
    response: _Response, average: Average, components: Iterable[accumulator_pb2.ComponentGradient]
) -> None:
    response.average.CopyFrom(_without_components(average))
    response.average.components.extend(components)


def _serialized(
    response: _Response, average: Average, components: Iterator[accumulator_pb2.ComponentGradient]
) -> Serialized:
    parts = repeated(components, lambda some: accumulator_pb2.Average(components=some))
    rest = _without_components(average).SerializeToString()
    return Serialized(response.SerializeToString() + within(type(response), "average", [rest, *parts]))


def _components(average: Average, tensors: Iterator[tensor_pb2.Tensor]) -> Iterator[accumulator_pb2.ComponentGradient]:
    for name, value in average.values.items():
        if isinstance(value, SparseSlices):
            component = accumulator_pb2.ComponentGradient(name=name)
            component.sparse.indices.CopyFrom(next(tensors))
            component.sparse.values.CopyFrom(next(tensors))
            component.sparse.dense_shape.dims.extend(value.dense_shape or ())
            yield component
        else:
            yield accumulator_pb2.ComponentGradient(name=name, dense=next(tensors))


def _without_components(average: Average) -> accumulator_pb2.Average:
    return accumulator_pb2.Average(
        step=average.step,
        num_gradients=average.num_gradients,
        total_weight=average.total_weight,
        worker_ids=average.worker_ids,
        round=average.round_number + 1,
        parts=None if average.parts is None else _encode_parts(average.parts),
    )


def _encode_parts(parts: RoundParts) -> accumulator_pb2.RoundParts:
    return accumulator_pb2.RoundParts(
        home_incarnation=parts.home_incarnation,
        part_ids=map(bytes.fromhex, parts.ids),
        weights=parts.weights,
        oldest_round=parts.oldest_round + 1,
        oldest_step=parts.oldest_step,
        sums=parts.sums,
        epoch=parts.epoch,
        oldest_epoch=parts.oldest_epoch,
    )


# Replies with averages, serialized once for all calls that get the same one

_MOST_BYTES = 4 << 20
"""The longest reply that is kept. Clients in Python ask for inline averages of up to 3 MiB."""


@dataclass(frozen=True)
class _Kept:
    average: "weakref.ref[Average]"
    message: bytes
    reply: bytes


class ReplyEncoder:
    """Serializes replies, and keeps the latest one as long as its average: other calls may be answered in the same way.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def __call__(self, reply: WithContents) -> bytes:
        """Returns a reply as it is sent."""
        contents = reply.contents
        if not isinstance(contents, ContentsOfAverage) or contents.average is None or not contents.buffers:
            return encode_message(reply)
        message = reply.message.SerializeToString()
        kept = self._kept
        if kept is not None and kept.average() is contents.average and kept.message == message:
            return kept.reply
        encoded = encode_message(reply)
        if len(encoded) <= _MOST_BYTES:
            self._kept = _Kept(weakref.ref(contents.average, self._forget), message, encoded)
        return encoded

    def _forget(self, average: "weakref.ref[Average]") -> None:
        if self._kept is not None and self._kept.average is average:
            self._kept = None


def reply_codecs() -> Mapping[str, Codec]:
    """Returns the serializers of the methods whose replies several calls may get."""
    return {method: Codec(encode=ReplyEncoder()) for method in ("PushPull", "ReadAverage", "ReduceGradients")}


# Descriptions of accumulators

_REDUCTION_CODES = {
    Reduction.MEAN: accumulator_pb2.REDUCTION_MEAN,
    Reduction.SUM: accumulator_pb2.REDUCTION_SUM,
}


_LAYOUT_CODES = {
    Layout.DENSE: accumulator_pb2.LAYOUT_DENSE,
    Layout.SPARSE: accumulator_pb2.LAYOUT_SPARSE,
}


@dataclass(frozen=True)
class ServerId:
    """The server in descriptions of its accumulators.

    Attributes:
        incarnation: The id of this run of it.
        member: Its place in a cluster, as `Member.text`; empty if it is in none.
    """

    incarnation: str
    member: str


def num_parts(accumulator: Accumulator) -> int:
    """Returns the number of parts that the message of an accumulator has."""
    return len(accumulator.rounds.members.workers) + accumulator.spec.num_parts + 2 * len(accumulator.spec.agreement)


def encode_info(
    server: ServerId, key: ResourceKey, accumulator: Accumulator, state: AccumulatorState, lifetime: Lifetime
) -> accumulator_pb2.AccumulatorInfo:
    """Returns the state of an accumulator of this server as a message. Can run in any thread."""
    info = _info_without_spec(server, key, accumulator, state, lifetime)
    info.spec.CopyFrom(_spec_without_components(accumulator))
    info.spec.components.extend(map(_encode_component, accumulator.spec.components))
    return info


def serialize_info(
    server: ServerId, key: ResourceKey, accumulator: Accumulator, state: AccumulatorState, lifetime: Lifetime
) -> bytes:
    """Returns what `encode_info` does, serialized, for any number of components."""
    spec = accumulator.spec
    parts = repeated(
        map(_encode_component, spec.components), lambda some: accumulator_pb2.AccumulatorSpec(components=some)
    )
    rest = _spec_without_components(accumulator).SerializeToString()
    info = _info_without_spec(server, key, accumulator, state, lifetime).SerializeToString()
    return info + within(accumulator_pb2.AccumulatorInfo, "spec", [rest, *parts])


def _info_without_spec(
    server: ServerId, key: ResourceKey, accumulator: Accumulator, state: AccumulatorState, lifetime: Lifetime
) -> accumulator_pb2.AccumulatorInfo:
    return accumulator_pb2.AccumulatorInfo(
        accumulator=accumulator_pb2.AccumulatorRef(
            container=key.container, name=key.name, incarnation=accumulator.incarnation, member=server.member
        ),
        global_step=state.global_step,
        num_accumulated=state.num_accumulated,
        num_waiting=state.num_waiting,
        num_bytes=state.num_bytes,
        worker_ids=state.worker_ids,
        kept_steps=state.kept_steps,
        is_private=bool(lifetime.owner),
        idle_lease=encode_idle_lease(lifetime),
        server_incarnation=server.incarnation,
        epoch=state.epoch,
    )


def _spec_without_components(accumulator: Accumulator) -> accumulator_pb2.AccumulatorSpec:
    """Returns the message of a spec, with every field set but the components."""
    spec = accumulator.spec
    return accumulator_pb2.AccumulatorSpec(
        reduction=_REDUCTION_CODES[spec.reduction],
        accumulate_dtype=None if spec.accumulate_dtype is None else to_data_type(spec.accumulate_dtype),
        deterministic=spec.deterministic,
        keep_averages=spec.keep_averages,
        one_per_worker=spec.one_per_worker,
        refuse_non_finite=spec.refuse_non_finite,
        durability=encode_durability(spec.durability),
        device=accumulator.place.name,
        agreement=spec.agreement,
        num_shards=spec.num_shards,
    )


def _encode_component(component: ComponentSpec) -> accumulator_pb2.ComponentSpec:
    return accumulator_pb2.ComponentSpec(
        name=component.name,
        dtype=to_data_type(component.dtype),
        shape=accumulator_pb2.PartialShape(unknown_rank=component.shape.dims is None, dims=component.shape.dims),
        layout=_LAYOUT_CODES[component.layout],
        pieces=[accumulator_pb2.Piece(server=each.server, num_rows=each.num_rows) for each in component.pieces],
    )
