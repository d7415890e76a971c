"""Inline tensors put into a message when it is written mean what protobuf would have written."""

from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradserve
from gradserve_protocol.tensors import Contents, WithContents, encode_message, to_data_type
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, batch_norm_layer_pb2, tensor_pb2

Part: TypeAlias = tuple[str, bool, int, list[int] | None]

sizes = st.sampled_from([0, 1, 3, 1000, 4095, 4096, 4097, 70_000])
components = st.lists(
    st.tuples(st.text(max_size=5), st.booleans(), sizes, st.none() | st.lists(st.integers(-1, 9), max_size=3)),
    max_size=4,
)


def ordinary(array: Any) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=to_data_type(array.dtype), shape=array.shape, content=array.tobytes())


def part(name: str, sparse: bool, size: int, dense_shape: list[int] | None, tensor: Any) -> Any:
    values = np.arange(size, dtype=np.float32)
    component = accumulator_pb2.ComponentGradient(name=name)
    if not sparse:
        component.dense.CopyFrom(tensor(values))
        return component
    component.sparse.indices.CopyFrom(tensor(np.arange(size, dtype=np.int64)))
    component.sparse.values.CopyFrom(tensor(values.reshape(size, 1)))
    if dense_shape is not None:
        component.sparse.dense_shape.dims.extend(dense_shape)
        component.sparse.dense_shape.SetInParent()
    return component


def request(parts: list[Part], tensor: Any) -> messages_pb2.PushPullRequest:
    return messages_pb2.PushPullRequest(
        accumulator=accumulator_pb2.AccumulatorRef(name="net"),
        request_id=accumulator_pb2.RequestId(client_id="somebody", sequence=2**64 - 1),
        gradient=[part(*each, tensor) for each in parts],
        weight=0.5,
        num_required=4,
    )


@settings(deadline=None)
@given(components)
def test_of_a_request(parts: list[Part]) -> None:
    contents = Contents()
    written = encode_message(WithContents(request(parts, contents.tensor), contents))
    expected = request(parts, ordinary)
    assert messages_pb2.PushPullRequest.FromString(written) == expected
    assert len(written) == expected.ByteSize()


@settings(deadline=None)
@given(components)
def test_of_a_response(parts: list[Part]) -> None:
    def response(tensor: Any) -> messages_pb2.TakeGradientResponse:
        average = accumulator_pb2.Average(components=[part(*each, tensor) for each in parts], step=7)
        return messages_pb2.TakeGradientResponse(average=average, duplicate=True)

    contents = Contents()
    written = encode_message(WithContents(response(contents.tensor), contents))
    assert messages_pb2.TakeGradientResponse.FromString(written) == response(ordinary)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), sizes, max_size=4))
def test_in_a_map(values: dict[str, int]) -> None:
    def config(tensor: Any) -> batch_norm_layer_pb2.BatchNormConfig:
        message = batch_norm_layer_pb2.BatchNormConfig(decay=0.5, renorm_clipping={"rmax": 3.0})
        for name, size in values.items():
            message.param_initializers[name].tensor.CopyFrom(tensor(np.arange(size, dtype=np.float32)))
        message.param_initializers["named"].named.name = "zeros"
        return message

    contents = Contents()
    written = encode_message(WithContents(config(contents.tensor), contents))
    assert batch_norm_layer_pb2.BatchNormConfig.FromString(written) == config(ordinary)


def test_small_contents_are_ordinary() -> None:
    contents = Contents()
    tensor = contents.tensor(np.ones(3, np.float32))
    assert not contents.buffers
    assert tensor == ordinary(np.ones(3, np.float32))


def test_numbers_of_numpy_are_arrays_without_dimensions() -> None:
    """Sums of NumPy are such numbers."""
    contents = Contents()
    number, many = np.float32(3), np.ones(5000, np.float32)
    inside, beside = Contents().tensor(number), contents.tensors([many, number])  # type: ignore[arg-type, list-item]
    assert (inside.content, list(inside.shape)) == (number.tobytes(), [])
    assert bytes(contents.buffers[beside[1].payload_offset]) == number.tobytes()


def test_stored_tensors_stay_handles() -> None:
    contents = Contents()
    stored = tensor_pb2.Tensor(handle="stored")
    gradient = [
        accumulator_pb2.ComponentGradient(name="a", dense=stored),
        accumulator_pb2.ComponentGradient(name="b", dense=contents.tensor(np.ones(10_000, np.float32))),
    ]
    written = encode_message(WithContents(messages_pb2.ApplyGradientRequest(gradient=gradient), contents))
    read = messages_pb2.ApplyGradientRequest.FromString(written)
    assert read.gradient[0].dense == stored
    assert read.gradient[1].dense == ordinary(np.ones(10_000, np.float32))


@pytest.mark.parametrize("num_bytes", [4, 16_380, 16_384, 3 << 20, (3 << 20) + 4, 5 << 20])
def test_round_of_any_size(client: gradserve.Client, num_bytes: int) -> None:
    """Below and above all that decides how a tensor travels."""
    value = np.random.default_rng(num_bytes).normal(size=num_bytes // 4).astype(np.float32)
    acc = client.conditional_accumulator("float32")
    for _ in range(2):
        acc.apply_grad(value)
    np.testing.assert_array_equal(acc.take_grad(2), value)
    np.testing.assert_array_equal(acc.read_average(1), value)


def test_an_id_is_known_for_contents_that_differ_anywhere(client: gradserve.Client) -> None:
    value = np.zeros(300_000, np.float32)
    acc = client.conditional_accumulator("float32")
    acc.apply_grad(value, request_id=10**9)
    assert acc.apply_grad(value, request_id=10**9).duplicate
    for position in (0, 150_000, 299_999):
        other = value.copy()
        other[position] = 1
        with pytest.raises(gradserve.InvalidArgumentError, match="expected the same content"):
            acc.apply_grad(other, request_id=10**9)
