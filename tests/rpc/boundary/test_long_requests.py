"""Requests of very many parts are parsed in slices, which gives what parsing them at once gives."""

import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from gradserve.v1 import tensor_messages_pb2, tensor_pb2
from gradserve.wire.tensors import PartDecoder
from gradserve_server.rpc.boundary import messages as long_requests
from gradserve_server.rpc.boundary.messages import (
    SLICE_BYTES,
    UNCHECKED_BYTES,
    MalformedMessage,
    RequestReader,
    parse_in_slices,
    slices,
)
from gradserve_server.runtime.process import switch_threads_often
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

    monkeypatch.setattr(long_requests, "slices", noted)
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
    monkeypatch.setattr(long_requests, "slices", None)
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
