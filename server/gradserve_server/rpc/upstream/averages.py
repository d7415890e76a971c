"""Averages that a server upstream has sent."""

from collections.abc import Mapping

from gradserve.calls.exchange import Operation, Reply
from gradserve.calls.tensors import receive_results
from gradserve.v1 import accumulator_pb2, tensor_pb2
from gradserve_server.accumulators.gradient import Average, SparseSlices, Value


def receive_average(reply: Reply) -> Operation[Average | None]:
    """Returns the average in a response; None if it has none."""
    message = reply.message
    if "average" not in message.DESCRIPTOR.fields_by_name or not message.HasField("average"):
        return None
    average: accumulator_pb2.Average = message.average
    tensors: list[tensor_pb2.Tensor] = []
    for part in average.components:
        tensors += [part.sparse.indices, part.sparse.values] if part.HasField("sparse") else [part.dense]
    received = yield from receive_results(reply, tensors)
    for array in received:
        array.flags.writeable = False
    arrays = iter(received)
    values: dict[str, Value] = {}
    for part in average.components:
        if part.HasField("sparse"):
            indices = next(arrays)
            values[part.name] = SparseSlices(indices, next(arrays), tuple(part.sparse.dense_shape.dims))
        else:
            values[part.name] = next(arrays)
    return average_of(average, values)


def average_of(message: accumulator_pb2.Average, values: Mapping[str, Value]) -> Average:
    """Returns an average, of its message and its values."""
    return Average(
        values=values,
        step=message.step,
        round_number=message.round - 1,
        num_gradients=message.num_gradients,
        total_weight=message.total_weight,
        worker_ids=tuple(message.worker_ids),
    )
