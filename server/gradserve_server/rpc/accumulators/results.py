"""Converts the answers of an accumulator to messages."""

from gradserve.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve.v1 import accumulator_pb2
from gradserve.wire.contents import Contents, WithContents
from gradserve_server.accumulators.gradient import Average, SparseSlices
from gradserve_server.accumulators.results import Applied, Outcome
from gradserve_server.rpc.tensors.messages import encode_delivered
from gradserve_server.tensors.delivery import Delivery

_OUTCOMES = {
    Outcome.ACCEPTED: accumulator_pb2.APPLY_OUTCOME_ACCEPTED,
    Outcome.STALE: accumulator_pb2.APPLY_OUTCOME_STALE,
    Outcome.ALREADY_COUNTED: accumulator_pb2.APPLY_OUTCOME_ALREADY_COUNTED,
}


def encode_applied(applied: Applied, *, duplicate: bool) -> messages_pb2.ApplyGradientResponse:
    """Returns the response of an apply."""
    return messages_pb2.ApplyGradientResponse(
        outcome=_OUTCOMES[applied.outcome],
        duplicate=duplicate,
        global_step=applied.global_step,
        num_accumulated=applied.num_accumulated,
    )


def encode_taken(average: Average, delivery: Delivery, *, duplicate: bool) -> WithContents:
    """Delivers the average of a take; returns the response."""
    contents = Contents()
    encoded = _encode_average(average, delivery, contents)
    return WithContents(messages_pb2.TakeGradientResponse(average=encoded, duplicate=duplicate), contents)


def encode_read(average: Average, delivery: Delivery) -> WithContents:
    """Delivers an average that was read; returns the response."""
    contents = Contents()
    response = messages_pb2.ReadAverageResponse(average=_encode_average(average, delivery, contents))
    return WithContents(response, contents)


def encode_pulled(
    applied: Applied, average: Average | None, delivery: Delivery, *, duplicate: bool, global_step: int
) -> WithContents:
    """Delivers the average of a push_pull; returns the response.

    Args:
        applied: The outcome of the gradient.
        average: The average, if there is one.
        delivery: Delivers the average.
        duplicate: Whether the call was a duplicate.
        global_step: The current step, for a gradient that is in no round.
    """
    contents = Contents()
    if average is not None and applied.outcome is not Outcome.STALE:
        global_step = average.step
    response = messages_pb2.PushPullResponse(
        outcome=_OUTCOMES[applied.outcome],
        duplicate=duplicate,
        average=None if average is None else _encode_average(average, delivery, contents),
        global_step=global_step,
    )
    return WithContents(response, contents)


def _encode_average(average: Average, delivery: Delivery, contents: Contents) -> accumulator_pb2.Average:
    # Shared, because the history or other callers have the same arrays.
    tensors = iter(encode_delivered(delivery.deliver(average.arrays, shared=True), contents))
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
    )
