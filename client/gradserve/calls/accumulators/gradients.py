"""The messages of the tensors of gradients and averages."""

from collections.abc import Mapping, Sequence

import numpy as np

from gradserve.calls.accumulators.components import Sent
from gradserve.calls.exchange import Operation, Reply
from gradserve.calls.progress import Progress
from gradserve.calls.tensors.arguments import receive_results
from gradserve.gpu.arrays import GpuArray
from gradserve.results import IndexedSlices, TensorHandle, Value
from gradserve.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve.v1 import accumulator_pb2, tensor_pb2
from gradserve.wire.arrays import AnyArray

_NOTHING = np.empty(0)


def arrays_of(values: Mapping[str, Sent]) -> tuple[list[AnyArray], bool]:
    """Returns the arrays of a gradient, in the order in which `add_gradient` takes their messages.

    Also returns whether it has handles.
    """
    arrays: list[AnyArray] = []
    has_handles = False
    for value in values.values():
        if isinstance(value, np.ndarray | GpuArray):
            arrays.append(value)
        elif isinstance(value, IndexedSlices):
            arrays += [value.indices, value.values]
        else:
            has_handles = True
    return arrays, has_handles


def without_arrays(values: Mapping[str, Sent]) -> dict[str, Sent]:
    """Returns what `add_gradient` needs of a gradient beside the messages of its arrays."""
    return {
        name: value
        if isinstance(value, TensorHandle)
        else IndexedSlices(_NOTHING, _NOTHING, value.dense_shape)
        if isinstance(value, IndexedSlices)
        else _NOTHING
        for name, value in values.items()
    }


def add_gradient(
    request: messages_pb2.ApplyGradientRequest | messages_pb2.PushPullRequest | messages_pb2.StageGradientRequest,
    values: Mapping[str, Sent],
    tensors: Sequence[tensor_pb2.Tensor],
) -> None:
    """Adds a gradient to a request, with the messages of its arrays."""
    supply = iter(tensors)
    for name, value in values.items():
        part = request.gradient.add(name=name)
        if isinstance(value, np.ndarray | GpuArray):
            part.dense.CopyFrom(next(supply))
        elif isinstance(value, IndexedSlices):
            part.sparse.indices.CopyFrom(next(supply))
            part.sparse.values.CopyFrom(next(supply))
            if value.dense_shape is not None:
                part.sparse.dense_shape.dims.extend(value.dense_shape)
                part.sparse.dense_shape.SetInParent()
        else:
            part.dense.handle = value.handle


def receive_values(reply: Reply, progress: Progress | None, *, in_place: bool) -> Operation[dict[str, Value]]:
    """Returns the components of the average in a reply, by name; read-only ones if they may be memory of the server."""
    message: accumulator_pb2.Average = reply.message.average
    tensors: list[tensor_pb2.Tensor] = []
    for part in message.components:
        tensors += [part.sparse.indices, part.sparse.values] if part.HasField("sparse") else [part.dense]
    received = yield from receive_results(reply, tensors, progress)
    if in_place:
        # Whichever way they came, so that programs do not depend on it.
        for array in received:
            array.flags.writeable = False
    arrays = iter(received)
    components: dict[str, Value] = {}
    for part in message.components:
        if part.HasField("sparse"):
            indices = next(arrays)
            components[part.name] = IndexedSlices(next(arrays), indices, tuple(part.sparse.dense_shape.dims))
        else:
            components[part.name] = next(arrays)
    return components
