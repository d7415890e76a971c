"""Replies of very many parts are serialized in slices, which gives what serializing them at once gives."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gradserve.v1 import accumulator_messages_pb2, accumulator_pb2, cudnn_rnn_messages_pb2, tensor_messages_pb2
from gradserve.wire.tensors import Contents
from gradserve_server.rpc.boundary.messages import repeated, within
from gradserve_server.rpc.tensors.messages import encode_handle, encode_spec
from gradserve_server.tensors.spec import TensorSpec

SPEC = TensorSpec(np.dtype(np.float32), (2, 3))
STORED = tensor_messages_pb2.PutTensorsResponse
AVERAGE = accumulator_messages_pb2.TakeGradientResponse


def component(name: str) -> accumulator_pb2.ComponentGradient:
    return accumulator_pb2.ComponentGradient(name=name)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 3000])
def test_a_list(count: int) -> None:
    sizes: list[int] = []

    def some(tensors: Sequence[Any]) -> STORED:
        sizes.append(len(tensors))
        return STORED(tensors=tensors)

    handles = [str(number) for number in range(count)]
    data = b"".join(repeated([encode_handle(SPEC, each) for each in handles], some))
    assert data == STORED(tensors=[encode_handle(SPEC, each) for each in handles]).SerializeToString()
    assert sum(sizes) == count
    assert max(sizes, default=0) <= 256


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_a_message_in_a_message(count: int) -> None:
    names = [f"layer {number}" for number in range(count)]
    expected = accumulator_pb2.Average(components=map(component, names), step=7)
    parts = repeated(map(component, names), lambda some: accumulator_pb2.Average(components=some))
    step = accumulator_pb2.Average(step=7).SerializeToString()
    assert AVERAGE.FromString(within(AVERAGE, "average", [*parts, step])) == AVERAGE(average=expected)


@pytest.mark.parametrize("beside", [True, False])
def test_tensors_one_by_one(*, beside: bool) -> None:
    arrays = [np.full(2000, number, np.float32) for number in range(20)]
    contents, at_once = Contents(), Contents()
    tensors = list(contents.each_tensor(arrays, beside=beside))
    if beside:
        assert tensors == at_once.tensors(arrays)
        assert contents == at_once
    else:
        assert [each.content for each in tensors] == [array.tobytes() for array in arrays]
        assert not contents.buffers
    assert not list(contents.each_tensor([], beside=beside))
    few = list(Contents().each_tensor([np.zeros(3)], beside=beside))
    assert [each.content for each in few] == [bytes(24)]


def test_lists_of_an_op() -> None:
    kind = cudnn_rnn_messages_pb2.CudnnRNNParamsToCanonicalResponse
    tensors = [encode_handle(SPEC, str(number)) for number in range(600)]
    parts = [b"".join(repeated(tensors, lambda some: kind(weights=some)))]
    parts += repeated(tensors[:3], lambda some: kind(biases=some))
    assert b"".join(parts) == kind(weights=tensors, biases=tensors[:3]).SerializeToString()
    assert encode_spec(SPEC).shape == [2, 3]
