"""Messages of very many parts are parsed and serialized in slices, which gives what doing so at once gives."""

import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from gradserve_protocol.tensors import Contents, PartDecoder
from gradserve_protocol.v1 import (
    accumulator_messages_pb2,
    accumulator_pb2,
    cudnn_rnn_messages_pb2,
    tensor_messages_pb2,
    tensor_pb2,
)
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.rpc.boundary import messages
from gradserve_server.rpc.boundary.messages import (
    SLICE_BYTES,
    UNCHECKED_BYTES,
    Entries,
    MalformedMessage,
    Piece,
    RequestReader,
    Serialized,
    assembled,
    parse_in_slices,
    slices,
)
from gradserve_server.rpc.tensors.messages import encode_handle, encode_spec
from gradserve_server.runtime.process import switch_threads_often
from gradserve_server.tensors.spec import TensorSpec
from tests.bad_input.requests import Apply, Create, component, dense, identity, ref, sparse, spec, zeros
from tests.bad_input.test_streams import header

MANY = 6000


NAMES = [f"layer {number}" for number in range(MANY)]


STORE = tensor_messages_pb2.StoreTensorsRequest


EMPTY = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[0], content=b"")


LONG: dict[str, Any] = {
    "components of an accumulator": Create(accumulator=ref("a"), spec=spec(*[component(each) for each in NAMES])),
    "dense gradients": Apply(accumulator=ref("a"), gradient=[dense(zeros(1), each) for each in NAMES]),
    "sparse gradients": Apply(
        accumulator=ref("a"),
        gradient=[sparse([0], (1, 1), (1, 1), each) for each in NAMES],
        local_step=7,
        request_id=identity(3),
    ),
    "a header": header(*[[2, 3]] * 4 * MANY),
    "empty tensors": STORE(tensors=[EMPTY] * 2 * MANY),
    "handles": tensor_messages_pb2.DeleteTensorsRequest(handles=NAMES),
    "one that is long among many": STORE(tensors=[EMPTY, tensor_pb2.Tensor(content=bytes(1 << 20)), *[EMPTY] * MANY]),
}


@pytest.mark.parametrize("name", LONG)
async def test_no_step_parses_much(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    message = LONG[name]
    parsed: list[int] = []

    def noted(*args: Any) -> Iterator[bytes]:
        for part in slices(*args):
            parsed.append(len(part))
            yield part

    monkeypatch.setattr(messages, "slices", noted)
    decoder = PartDecoder if name == "a header" else None
    assert await RequestReader(message.DESCRIPTOR, decoder).read(message.SerializeToString()) == message
    assert len(parsed) > 1
    longest = 1 << 20 if name == "one that is long among many" else 0
    assert max(parsed) < SLICE_BYTES + longest + 200
    assert sum(parsed) < 1.1 * message.ByteSize()


@pytest.mark.parametrize(
    "message", [STORE(tensors=[EMPTY] * 100), STORE(tensors=[tensor_pb2.Tensor(content=bytes(UNCHECKED_BYTES))] * 50)]
)
async def test_few_parts_are_parsed_at_once(message: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "slices", None)
    assert await RequestReader(message.DESCRIPTOR).read(message.SerializeToString()) == message


async def test_long_messages_that_are_malformed() -> None:
    message = LONG["dense gradients"]
    data = message.SerializeToString() + b"\x0a\x05"
    assert isinstance(await RequestReader(message.DESCRIPTOR).read(data), MalformedMessage)


def outcome(parse: Any, *args: Any) -> Any:
    try:
        return parse(*args)
    except DecodeError:
        return "malformed"


SMALL = [
    Apply(gradient=[sparse([0], (1, 1), (1, 1), "s")], local_step=1 << 40, request_id=identity(3), weight=2.5),
    Create(accumulator=ref("a"), spec=spec(component("a", dims=[1, -1]), component("b"))),
    header([1], [2, 3]),
    tensor_messages_pb2.PutTensorsRequest(chunk=b"abcdef"),
]


def of_any_bytes(seed: int) -> tuple[Any, bytes]:
    """Returns a type and something like messages of it one after the other, with bytes changed or cut off."""
    generator = random.Random(seed)
    kind: Any = type(generator.choice(SMALL))
    of_kind = [each for each in SMALL if type(each) is kind]
    data = bytearray(b"".join(generator.choice(of_kind).SerializeToString() for _ in range(3)))
    for _ in range(generator.randrange(3)):
        data[generator.randrange(len(data))] = generator.choice([0, 1, 3, 10, 18, 0x7F, 0x80, 0xFF])
    return kind, bytes(data[: generator.choice([len(data), generator.randrange(len(data))])])


@pytest.mark.parametrize("slice_bytes", [1, 5, 20])
def test_any_bytes_give_what_they_give_at_once(slice_bytes: int) -> None:
    malformed = 0
    for seed in range(1500):
        kind, data = of_any_bytes(seed)
        expected = outcome(kind.FromString, data)
        assert outcome(parse_in_slices, kind, data, slice_bytes) == expected, (seed, data)
        malformed += expected == "malformed"
    assert 100 < malformed < 1400


def test_threads_take_turns_often() -> None:
    before = sys.getswitchinterval()
    try:
        switch_threads_often()
        assert sys.getswitchinterval() < before / 2
    finally:
        sys.setswitchinterval(before)


SPEC = TensorSpec(np.dtype(np.float32), (2, 3))


STORED = tensor_messages_pb2.PutTensorsResponse


AVERAGE = accumulator_messages_pb2.TakeGradientResponse


def named(name: str) -> accumulator_pb2.ComponentGradient:
    return accumulator_pb2.ComponentGradient(name=name)


def stored(count: int) -> list[Any]:
    return [encode_handle(SPEC, str(number)) for number in range(count)]


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 3000])
async def test_a_list(count: int) -> None:
    message = await assembled(InlineCompute(), count, STORED(), [Entries("tensors", stored(count))])
    assert isinstance(message, Serialized) == (count > 256)
    assert message.SerializeToString() == STORED(tensors=stored(count)).SerializeToString()


@pytest.mark.parametrize("count", [0, 1, 1000])
async def test_a_message_in_a_message(count: int) -> None:
    components = [named(f"layer {number}") for number in range(count)]
    expected = AVERAGE(duplicate=True, average=accumulator_pb2.Average(components=components, step=7))
    step = accumulator_pb2.Average(step=7)
    for num_parts in (1, 1000):
        given: list[Piece] = [("average", [Entries("components", components), step])]
        message = await assembled(InlineCompute(), num_parts, AVERAGE(duplicate=True), given)
        assert AVERAGE.FromString(message.SerializeToString()) == expected


@pytest.mark.parametrize("count", [1, 1000])
async def test_messages_in_a_list(count: int) -> None:
    kind, info = accumulator_messages_pb2.ListAccumulatorsResponse, accumulator_pb2.AccumulatorInfo
    pieces: list[Piece] = [
        ("accumulators", [info(global_step=1), ("spec", [])]),
        ("accumulators", [info(global_step=2), ("spec", [accumulator_pb2.AccumulatorSpec(device="x")])]),
        ("accumulators", []),
    ]
    message = await assembled(InlineCompute(), count, kind(next_page_token="t"), pieces)
    given = kind.FromString(message.SerializeToString())
    first = info(global_step=1, spec=accumulator_pb2.AccumulatorSpec())
    second = info(global_step=2, spec=accumulator_pb2.AccumulatorSpec(device="x"))
    assert given == kind(next_page_token="t", accumulators=[first, second, info()])


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


async def test_lists_of_an_op() -> None:
    kind = cudnn_rnn_messages_pb2.CudnnRNNParamsToCanonicalResponse
    tensors = stored(600)
    pieces = [Entries("weights", tensors), Entries("biases", tensors[:3])]
    message = await assembled(InlineCompute(), 600, kind(), pieces)
    assert message.SerializeToString() == kind(weights=tensors, biases=tensors[:3]).SerializeToString()
    assert encode_spec(SPEC).shape == [2, 3]
