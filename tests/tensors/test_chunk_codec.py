"""The zero-copy codec of the streams speaks the same bytes as the generated classes."""

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradserve_protocol.arrays import Array, Assembly, PayloadError, buffer_of
from gradserve_protocol.tensors import DEFAULT_CHUNK_BYTES, Chunk, PartDecoder, cut, encode_part, to_dtype
from gradserve_protocol.v1 import tensor_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import tensor_pb2

STREAM_CLASSES = [messages_pb2.PutTensorsRequest, messages_pb2.GetTensorsResponse]
NAMES = [name for name, number in tensor_pb2.DataType.items() if number]
DTYPES = [to_dtype(tensor_pb2.TensorSpec(dtype=name).dtype) for name in NAMES]
VARINT_EDGES = [0, 1, 127, 128, 16383, 16384, (1 << 21) - 1, 1 << 21, 1 << 20]
NOISE = random.Random(5).randbytes((1 << 21) + 1)

many = settings(max_examples=150)


def chunk_of(payload: bytes, cuts: Iterable[int] = ()) -> Chunk:
    """Returns a payload as a chunk whose pieces end at the `cuts`."""
    edges = [0, *sorted(cuts), len(payload)]
    view = memoryview(payload)
    return Chunk(tuple(view[start:end] for start, end in itertools.pairwise(edges)), len(payload))


def varint(number: int, padding: int = 0) -> bytes:
    """Returns a varint, made longer than necessary by `padding` bytes."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    for _ in range(padding):
        encoded[-1] |= 0x80
        encoded.append(0)
    return bytes(encoded)


def outcome(parse: Any, message: bytes) -> tuple[str, Any]:
    """Returns what a parser makes of a message, in a form in which the two kinds of parsers can be compared."""
    try:
        part = parse(message)
    except DecodeError:
        return "DecodeError", None
    if isinstance(part, memoryview):
        return "chunk", bytes(part)
    if part.WhichOneof("part") == "chunk":
        return "chunk", part.chunk
    return "message", part


@pytest.mark.parametrize("message_class", STREAM_CLASSES)
@pytest.mark.parametrize("size", VARINT_EDGES)
def test_encoded_chunk_is_the_generated_message(message_class: Any, size: int) -> None:
    payload = NOISE[:size]
    expected = message_class(chunk=payload).SerializeToString()
    assert encode_part(chunk_of(payload)) == expected
    assert encode_part(chunk_of(payload, [size // 3, size // 3, size // 2])) == expected


@many
@given(payload=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=8))
def test_pieces_do_not_show(payload: bytes, cuts: list[int]) -> None:
    within = [min(each, len(payload)) for each in cuts]
    expected = messages_pb2.PutTensorsRequest(chunk=payload).SerializeToString()
    assert encode_part(chunk_of(payload, within)) == expected


def test_chunk_without_pieces_is_an_empty_chunk() -> None:
    assert encode_part(Chunk((), 0)) == messages_pb2.PutTensorsRequest(chunk=b"").SerializeToString()


@pytest.mark.parametrize("message_class", STREAM_CLASSES)
@pytest.mark.parametrize("size", VARINT_EDGES)
def test_decoded_chunk_is_a_view_of_the_generated_message(message_class: Any, size: int) -> None:
    message: bytes = message_class(chunk=NOISE[:size]).SerializeToString()
    part = PartDecoder(message_class.FromString)(message)
    assert isinstance(part, memoryview)
    assert bytes(part) == NOISE[:size]
    assert part.obj is message
    if size:
        assert np.shares_memory(np.frombuffer(part, np.uint8), np.frombuffer(message, np.uint8))


@many
@given(
    message_class=st.sampled_from(STREAM_CLASSES),
    specs=st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)), max_size=4),
)
def test_header_survives_both_ways(message_class: Any, specs: list[tuple[int, list[int]]]) -> None:
    part = message_class()
    part.header.SetInParent()
    for data_type, shape in specs:
        part.header.tensors.add(dtype=data_type, shape=shape)
    message = encode_part(part)
    assert message == part.SerializeToString()
    assert PartDecoder(message_class.FromString)(message) == part


def fields(draw: st.DrawFn) -> bytes:
    """Draws one field: of the message or unknown, correct or not, varints longer than they need to be."""
    number = draw(st.sampled_from([1, 2, 2, 2, 3, 15, 16, 1000]))
    wire_type = draw(st.sampled_from([2, 2, 2, 2, 0, 1, 5, 3, 4]))
    tag = varint(number << 3 | wire_type, draw(st.sampled_from([0, 0, 0, 1, 3])))
    if wire_type == 0:
        return tag + varint(draw(st.integers(0, 2**64 - 1)), draw(st.sampled_from([0, 0, 1])))
    if wire_type in (1, 5):
        return tag + draw(st.binary(min_size=4, max_size=8))
    if wire_type in (3, 4):
        return tag
    payload = draw(st.binary(max_size=140))
    if number == 1 and draw(st.booleans()):
        payload = messages_pb2.PutTensorsHeader(
            tensors=[tensor_pb2.TensorSpec(dtype=tensor_pb2.DATA_TYPE_FLOAT32)]
        ).SerializeToString()
    length = draw(st.sampled_from([len(payload)] * 6 + [len(payload) + 1, max(len(payload) - 1, 0), 1 << 31, 1 << 34]))
    return tag + varint(length, draw(st.sampled_from([0, 0, 0, 1, 2, 4, 9]))) + payload


@many
@given(
    message_class=st.sampled_from(STREAM_CLASSES),
    message=st.lists(st.composite(fields)(), max_size=4).map(b"".join),
)
@example(messages_pb2.PutTensorsRequest, b"")
@example(messages_pb2.PutTensorsRequest, b"\x12")
@example(messages_pb2.PutTensorsRequest, b"\x12\x00\x12\x00")
@example(messages_pb2.PutTensorsRequest, b"\x12\x02ab\x12\x01c")  # repeated: the last wins
@example(messages_pb2.PutTensorsRequest, b"\x0a\x00\x12\x01c")  # both members: the last wins
@example(messages_pb2.PutTensorsRequest, b"\x12\x01c\x0a\x00")
@example(messages_pb2.PutTensorsRequest, b"\x18\x01\x12\x01c")  # unknown fields
@example(messages_pb2.PutTensorsRequest, b"\x12\x01c\x18\x01")
@example(messages_pb2.PutTensorsRequest, b"\x92\x00\x01c")  # longer tag than needed
@example(messages_pb2.PutTensorsRequest, b"\x12\x81\x00c")  # longer length than needed
@example(messages_pb2.PutTensorsRequest, b"\x12\x81\x80\x80\x80\x00c")
@example(messages_pb2.PutTensorsRequest, b"\x12\x81\x80\x80\x80\x80\x00c")
@example(messages_pb2.PutTensorsRequest, b"\x12\x81\x80\x80\x80\x10c")  # length 1 + 2^32
@example(messages_pb2.PutTensorsRequest, b"\x12\x81\x80\x80\x80\x70c")  # more bits than a length has
@example(messages_pb2.PutTensorsRequest, b"\x12\x02c")  # too short
@example(messages_pb2.PutTensorsRequest, b"\x12\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00")
@example(messages_pb2.PutTensorsRequest, b"\x10\x01")  # chunk as a varint: an unknown field
@example(messages_pb2.PutTensorsRequest, b"\x13\x14")  # chunk as a group
@example(messages_pb2.PutTensorsRequest, b"\x0a\x02\x0a\x05")  # malformed header
def test_odd_encodings_are_read_as_the_generated_parser_does(message_class: Any, message: bytes) -> None:
    assert outcome(PartDecoder(message_class.FromString), message) == outcome(message_class.FromString, message)


@many
@given(message=st.binary(max_size=40) | st.binary(max_size=40).map(b"\x12".__add__))
def test_any_bytes_are_read_as_the_generated_parser_does(message: bytes) -> None:
    for message_class in STREAM_CLASSES:
        assert outcome(PartDecoder(message_class.FromString), message) == outcome(message_class.FromString, message)


@given(garbage=st.integers(0, 255), size=st.sampled_from(VARINT_EDGES))
@settings(max_examples=40)
def test_a_byte_too_many_is_read_as_the_generated_parser_does(garbage: int, size: int) -> None:
    message = messages_pb2.PutTensorsRequest(chunk=NOISE[:size]).SerializeToString() + bytes([garbage])
    parse = messages_pb2.PutTensorsRequest.FromString
    assert outcome(PartDecoder(parse), message) == outcome(parse, message)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    num_bytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
    content = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    return np.frombuffer(content, dtype).reshape(shape)


def same_bits(got: Sequence[Array], expected: Sequence[Array]) -> bool:
    return [(a.dtype, a.shape, a.tobytes()) for a in got] == [(a.dtype, a.shape, a.tobytes()) for a in expected]


@many
@given(payload=st.lists(arrays(), max_size=5), chunk_bytes=st.integers(1, 200))
def test_cut_and_assembly_round_trip(payload: list[Array], chunk_bytes: int) -> None:
    total = sum(array.nbytes for array in payload)
    received = [np.empty(array.shape, array.dtype) for array in payload]
    assembly = Assembly(received)
    assert assembly.expected_bytes == total
    decode = PartDecoder(messages_pb2.GetTensorsResponse.FromString)
    sizes = []
    for chunk in cut(map(buffer_of, payload), chunk_bytes):
        sizes.append(chunk.num_bytes)
        assert chunk.num_bytes == sum(len(piece) for piece in chunk.pieces)
        part = decode(encode_part(chunk))
        assert isinstance(part, memoryview)
        assembly.write(part)
    assembly.finish()
    assert same_bits(received, payload)
    # All chunks are full but the last, and there is none without a byte.
    full, rest = divmod(total, chunk_bytes)
    assert sizes == [chunk_bytes] * full + [rest] * bool(rest)


@many
@given(
    payload=st.lists(arrays(), min_size=1, max_size=4),
    boundaries=st.lists(st.integers(0, 600), max_size=6),
    surplus=st.integers(1, 20),
)
def test_a_wrong_length_is_an_error(payload: list[Array], boundaries: list[int], surplus: int) -> None:
    content = b"".join(array.tobytes() for array in payload)
    edges = [0, *sorted(min(each, len(content)) for each in boundaries), len(content)]
    pieces = [memoryview(content)[start:end] for start, end in itertools.pairwise(edges)]

    exact = Assembly([np.empty(array.shape, array.dtype) for array in payload])
    for piece in pieces:
        exact.write(piece)
    exact.finish()
    with pytest.raises(PayloadError, match=f"expected a payload of {len(content)} bytes"):
        exact.write(memoryview(bytes(surplus)))

    if content:
        short = Assembly([np.empty(array.shape, array.dtype) for array in payload])
        short.write(memoryview(content)[:-1])
        with pytest.raises(PayloadError, match=f"got {len(content) - 1}$"):
            short.finish()


def test_a_payload_that_is_too_long_writes_nothing_beyond_the_arrays() -> None:
    memory = np.zeros(8, np.uint8)
    assembly = Assembly([memory[2:4]])
    with pytest.raises(PayloadError, match="expected a payload of 2 bytes as the header says, got 3 or more"):
        assembly.write(memoryview(b"\xff\xff\xff"))
    assert not memory[4:].any()
    assert not memory[:2].any()


def test_cut_does_not_copy() -> None:
    payload = [np.arange(5, dtype=np.int64), np.arange(300_000, dtype=np.float64)]
    chunks = list(cut(map(buffer_of, payload)))
    assert [chunk.num_bytes for chunk in chunks] == [
        DEFAULT_CHUNK_BYTES,
        DEFAULT_CHUNK_BYTES,
        40 + 2_400_000 - (2 << 20),
    ]
    assert len(chunks[0].pieces) == 2
    for piece in (piece for chunk in chunks for piece in chunk.pieces):
        assert any(np.shares_memory(np.frombuffer(piece, np.uint8), array) for array in payload)
