"""Encodes replies of AccumulatorService: outcomes, averages, and descriptions of accumulators."""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from google.protobuf.message import Message

from gradserve_protocol.tensors import Contents, WithContents, encode_message, to_data_type
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2
from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.gradient import Average, DifferentWorker, RoundParts, SparseSlices, Value
from gradserve_server.accumulators.rounds import AccumulatorState, Applied, Outcome
from gradserve_server.accumulators.spec import (
    ComponentSpec,
    Layout,
    Reduction,
)
from gradserve_server.devices.compute import PIECE_BYTES
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.rpc.boundary.chain import Codec
from gradserve_server.rpc.boundary.fields import encode_durability, encode_idle_lease
from gradserve_server.rpc.boundary.messages import Entries, Piece
from gradserve_server.rpc.tensors.messages import OutgoingTensors

# Outcomes and averages

OUTCOMES = {
    Outcome.ACCEPTED: accumulator_pb2.APPLY_OUTCOME_ACCEPTED,
    Outcome.STALE: accumulator_pb2.APPLY_OUTCOME_STALE,
    Outcome.ALREADY_COUNTED: accumulator_pb2.APPLY_OUTCOME_ALREADY_COUNTED,
}


def encode_applied(applied: Applied, *, duplicate: bool, num_rounds: int) -> messages_pb2.ApplyGradientResponse:
    """Returns the response of an apply, when `num_rounds` rounds have ended."""
    return messages_pb2.ApplyGradientResponse(
        outcome=OUTCOMES[applied.outcome],
        duplicate=duplicate,
        global_step=applied.global_step,
        num_accumulated=applied.num_accumulated,
        round=round_of(applied),
        num_rounds=num_rounds,
    )


def round_of(applied: Applied) -> int:
    """Returns the number of the round that a gradient is in, from 1; 0 if it is in none."""
    is_in_round = applied.outcome is Outcome.ACCEPTED and applied.round is not None
    return applied.round.number + 1 if is_in_round and applied.round is not None else 0


@dataclass
class ContentsOfAverage(Contents):
    """The contents of an average.

    Attributes:
        average: The average, whose arrays never change.
    """

    is_kept: ClassVar[bool] = True
    average: Average | None = None


async def encode_taken(average: Average, outgoing: OutgoingTensors, *, duplicate: bool) -> WithContents:
    """Returns the response of a take, with its average."""
    return await _with_average(messages_pb2.TakeGradientResponse(duplicate=duplicate), average, outgoing, Contents())


async def encode_read(average: Average, outgoing: OutgoingTensors) -> WithContents:
    """Returns the response with an average that was read."""
    contents = ContentsOfAverage(average=average)
    return await _with_average(messages_pb2.ReadAverageResponse(), average, outgoing, contents)


async def encode_reduced(average: Average, outgoing: OutgoingTensors) -> WithContents:
    """Returns the response with what this server has of an average."""
    contents = ContentsOfAverage(average=average)
    return await _with_average(messages_pb2.ReduceGradientsResponse(), average, outgoing, contents)


async def encode_pulled(
    applied: Applied, average: Average | None, outgoing: OutgoingTensors, *, duplicate: bool, global_step: int
) -> WithContents:
    """Returns the response of a push_pull.

    Args:
        applied: The outcome of the gradient.
        average: The average, if there is one.
        outgoing: Takes the average.
        duplicate: Whether the call was a duplicate.
        global_step: The current step, for a gradient that is in no round.
    """
    contents = ContentsOfAverage(average=average)
    if average is not None and applied.outcome is not Outcome.STALE:
        global_step = average.step
    response = messages_pb2.PushPullResponse(
        outcome=OUTCOMES[applied.outcome],
        duplicate=duplicate,
        global_step=global_step,
    )
    if average is None:
        return WithContents(response, contents)
    return await _with_average(response, average, outgoing, contents)


async def _with_average(
    response: Message, average: Average, outgoing: OutgoingTensors, contents: Contents
) -> WithContents:
    """Returns a response with an average in its field of that name."""
    average = await add_average(average, outgoing)
    return await outgoing.reply(response, lambda tensors: [("average", _pieces(average, tensors))], contents)


async def add_average(average: Average, outgoing: OutgoingTensors) -> Average:
    """Adds the arrays of an average to those of a reply; returns the average with the arrays that were added."""
    if average.host_copy is not None and outgoing.keeps(average.nbytes):
        await average.host_copy.reserve(outgoing.room.device, outgoing.room.owner)
    else:
        average = await average.on_host()
    arrays = await outgoing.compute.run(PIECE_BYTES * len(average.values), lambda: average.arrays)
    # Shared, because the history or other callers have the same arrays.
    await outgoing.add(arrays, shared=True)
    return average


def _pieces(average: Average, tensors: Iterator[tensor_pb2.Tensor]) -> Iterator[Piece]:
    yield accumulator_pb2.Average(
        step=average.step,
        num_gradients=average.num_gradients,
        total_weight=average.total_weight,
        worker_ids=average.worker_ids,
        round=average.round_number + 1,
        parts=None if average.parts is None else _encode_parts(average.parts),
        different_workers=encode_different(average.different_workers),
    )
    yield component_values(average.values, tensors)


def encode_different(workers: Iterable[DifferentWorker]) -> list[accumulator_pb2.DifferentWorker]:
    """Converts workers with other parameters than most to messages."""
    return [accumulator_pb2.DifferentWorker(worker_id=each.worker_id, equal_at=each.equal_at) for each in workers]


def component_values(values: Mapping[str, Value], tensors: Iterator[tensor_pb2.Tensor]) -> Entries:
    """Returns the field `components` of a message, with the messages of their arrays."""
    components = (
        accumulator_pb2.ComponentGradient(name=name, sparse=_encode_sparse(value, tensors))
        if isinstance(value, SparseSlices)
        else accumulator_pb2.ComponentGradient(name=name, dense=next(tensors))
        for name, value in values.items()
    )
    return Entries("components", components)


def _encode_sparse(value: SparseSlices, tensors: Iterator[tensor_pb2.Tensor]) -> accumulator_pb2.SparseGradient:
    sparse = accumulator_pb2.SparseGradient(indices=next(tensors), values=next(tensors))
    sparse.dense_shape.dims.extend(value.dense_shape or ())
    return sparse


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


def info_pieces(
    server: ServerId, key: ResourceKey, accumulator: Accumulator, state: AccumulatorState, lifetime: Lifetime
) -> Iterator[Piece]:
    """Yields the message of an accumulator of this server in pieces. Can run in any thread."""
    yield accumulator_pb2.AccumulatorInfo(
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
        different_workers=encode_different(state.different_workers),
    )
    yield "spec", _spec_pieces(accumulator)


def _spec_pieces(accumulator: Accumulator) -> Iterator[Piece]:
    spec = accumulator.spec
    yield accumulator_pb2.AccumulatorSpec(
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
    yield Entries("components", map(encode_component, spec.components))


def encode_component(component: ComponentSpec) -> accumulator_pb2.ComponentSpec:
    """Returns the message of a component."""
    return accumulator_pb2.ComponentSpec(
        name=component.name,
        dtype=to_data_type(component.dtype),
        shape=accumulator_pb2.PartialShape(unknown_rank=component.shape.dims is None, dims=component.shape.dims),
        layout=_LAYOUT_CODES[component.layout],
        pieces=[accumulator_pb2.Piece(server=each.server, num_rows=each.num_rows) for each in component.pieces],
    )
