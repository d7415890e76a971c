"""Converts the answers of an accumulator to messages."""

from collections.abc import Sequence

from gradserve.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve.v1 import accumulator_pb2
from gradserve.wire.contents import Contents, WithContents
from gradserve_server.accumulators.gradient import Average, SparseSlices
from gradserve_server.accumulators.results import Applied, Outcome
from gradserve_server.devices.compute import PIECE_BYTES, Compute
from gradserve_server.rpc.accumulators.reply_codec import ContentsOfAverage
from gradserve_server.rpc.tensors.messages import encode_delivered
from gradserve_server.tensors.delivery import Delivered, Delivery

_OUTCOMES = {
    Outcome.ACCEPTED: accumulator_pb2.APPLY_OUTCOME_ACCEPTED,
    Outcome.STALE: accumulator_pb2.APPLY_OUTCOME_STALE,
    Outcome.ALREADY_COUNTED: accumulator_pb2.APPLY_OUTCOME_ALREADY_COUNTED,
}


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


async def encode_taken(average: Average, delivery: Delivery, compute: Compute, *, duplicate: bool) -> WithContents:
    """Delivers the average of a take; returns the response."""
    contents = Contents()
    encoded = await _encode_average(average, delivery, contents, compute)
    return WithContents(messages_pb2.TakeGradientResponse(average=encoded, duplicate=duplicate), contents)


async def encode_read(average: Average, delivery: Delivery, compute: Compute) -> WithContents:
    """Delivers an average that was read; returns the response."""
    contents = ContentsOfAverage(average=average)
    response = messages_pb2.ReadAverageResponse(average=await _encode_average(average, delivery, contents, compute))
    return WithContents(response, contents)


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
        average=None if average is None else await _encode_average(average, delivery, contents, compute),
        global_step=global_step,
    )
    return WithContents(response, contents)


async def _encode_average(
    average: Average, delivery: Delivery, contents: Contents, compute: Compute
) -> accumulator_pb2.Average:
    # Shared, because the history or other callers have the same arrays.
    delivered = await delivery.deliver_many(average.arrays, shared=True)
    return await compute.run(PIECE_BYTES * len(delivered), _message, average, delivered, contents)


def _message(average: Average, delivered: Sequence[Delivered], contents: Contents) -> accumulator_pb2.Average:
    tensors = iter(encode_delivered(delivered, contents))
    components = []
    for name, value in average.values.items():
        if isinstance(value, SparseSlices):
            component = accumulator_pb2.ComponentGradient(name=name)
            component.sparse.indices.CopyFrom(next(tensors))
            component.sparse.values.CopyFrom(next(tensors))
            component.sparse.dense_shape.dims.extend(value.dense_shape or ())
        else:
            component = accumulator_pb2.ComponentGradient(name=name, dense=next(tensors))
        components.append(component)
    return accumulator_pb2.Average(
        components=components,
        step=average.step,
        num_gradients=average.num_gradients,
        total_weight=average.total_weight,
        worker_ids=average.worker_ids,
        round=average.round_number + 1,
    )
