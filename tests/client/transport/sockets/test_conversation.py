"""Frames as clients write and read them: whole ones, cut ones, and those that lie."""

import math
from typing import Any

import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

import gradserve
from gradserve.calls.exchange import Reply, Unary, Whole
from gradserve.calls.tensors import arrays_in
from gradserve.transport.sockets.conversation import Inbox, call, check_strand_answer, hello
from gradserve.transport.sockets.payloads import Payloads
from gradserve_protocol.frames import HEADER_BYTES, PROTOCOL, FrameHeader, FrameKind, Segment, pack_segments
from gradserve_protocol.memory.pool import BufferPool
from gradserve_protocol.tensors import Contents, WithContents
from gradserve_protocol.v1 import socket_messages_pb2, tensor_messages_pb2, tensor_pb2
from tests.client.transport.sockets.scripted import EndOfBytesError, carry_out

PAYLOADS = Payloads(BufferPool(0))
ARRAYS: list[np.ndarray[Any, Any]] = [
    np.arange(5000, dtype=np.float32),
    np.arange(4099, dtype=np.uint8),
    np.ones((0, 3)),
]
REQUEST = tensor_messages_pb2.ReadTensorsRequest(handles=["a", "b", "c"])
READ = Unary("TensorService", "ReadTensors", REQUEST)


def inbox() -> Inbox:
    return Inbox(takes_descriptors=False)


def reply_of(contents: Contents, response: Any, **fields: Any) -> bytes:
    message: bytes = response.SerializeToString()
    payload = b"".join(contents.pieces())
    header = FrameHeader(FrameKind.REPLY, message_bytes=len(message), payload_bytes=len(payload))
    return header._replace(**fields).pack() + message + payload


def good_reply(**fields: Any) -> bytes:
    contents = Contents()
    return reply_of(contents, tensor_messages_pb2.ReadTensorsResponse(tensors=contents.tensors(ARRAYS)), **fields)


def read(replies: bytes, in_one_go: int = 1 << 20) -> Any:
    return carry_out(call(Whole(READ), math.inf, PAYLOADS, inbox()), replies, in_one_go)


def test_a_call_with_arrays() -> None:
    contents = Contents()
    request = tensor_messages_pb2.StoreTensorsRequest(tensors=contents.tensors(ARRAYS))
    store = Unary("TensorService", "StoreTensors", WithContents(request, contents))
    answer = reply_of(Contents(), tensor_messages_pb2.StoreTensorsResponse(tensors=[{"handle": "h"}]))
    reply, sent, taken = carry_out(call(Whole(store), 1.5, PAYLOADS, inbox()), answer)
    assert isinstance(reply, Reply)
    assert reply.message.tensors[0].handle == "h"
    assert taken == len(answer)
    header = FrameHeader.unpack(sent[:HEADER_BYTES])
    name, message = b"gradserve.v1.TensorService.StoreTensors", request.SerializeToString()
    payload = b"".join(contents.pieces())
    assert header == FrameHeader(FrameKind.CALL, 0, len(name), len(message), len(payload), 1_500_000, 0)
    assert sent[HEADER_BYTES:] == name + message + payload


@pytest.mark.parametrize("in_one_go", [1, 31, 33, 100, 20_001, 1 << 20])
def test_arrays_of_a_reply(in_one_go: int) -> None:
    replies = good_reply()
    reply, sent, taken = read(replies, in_one_go)
    assert FrameHeader.unpack(sent[:HEADER_BYTES]).number == 0
    assert taken == len(replies)
    first, second, empty = reply.message.tensors
    np.testing.assert_array_equal(reply.arrays[first.payload_offset], ARRAYS[0])
    np.testing.assert_array_equal(reply.arrays[second.payload_offset], ARRAYS[1])
    assert not empty.content
    assert all(each.flags.writeable for each in reply.arrays.values())


def test_segments_of_what_follows_the_message() -> None:
    """With gaps between them, which mean nothing."""
    contents = Contents()
    response = tensor_messages_pb2.ReadTensorsResponse(tensors=contents.tensors(ARRAYS))
    (first, one), (second, other) = contents.buffers.items()
    place = 64 + len(one) + -len(one) % 64 + 64
    segments = [Segment(first, len(one), 0, 64), Segment(second, len(other), 0, place)]
    message = response.SerializeToString()
    following = (b"?" * 64 + bytes(one)).ljust(place, b"?") + bytes(other) + b"?" * 7
    header = FrameHeader(FrameKind.REPLY, message_bytes=len(message), payload_bytes=len(following), size=2)
    reply, _, _ = read(header.pack() + pack_segments(segments) + message + following)
    np.testing.assert_array_equal(reply.arrays[first], ARRAYS[0])
    np.testing.assert_array_equal(reply.arrays[second], ARRAYS[1])


@given(st.integers(0, len(good_reply()) - 1))
def test_a_reply_cut_anywhere_is_not_complete(end: int) -> None:
    with pytest.raises(EndOfBytesError):
        read(good_reply()[:end])


def test_a_message_longer_than_what_is_received_at_once() -> None:
    replies = reply_of(
        Contents(), tensor_messages_pb2.ReadTensorsResponse(tensors=[tensor_pb2.Tensor(content=bytes(100_000))])
    )
    reply, _, taken = read(replies)
    assert len(reply.message.tensors[0].content) == 100_000
    assert taken == len(replies)


def test_a_tensor_without_elements_needs_no_payload() -> None:
    reply, _, _ = read(reply_of(Contents(), tensor_messages_pb2.ReadTensorsResponse(tensors=[tensor(0, (0, 3))])))
    assert [each.shape for each in arrays_in(reply, reply.message.tensors)] == [(0, 3)]
    reply, _, _ = read(reply_of(Contents(), tensor_messages_pb2.ReadTensorsResponse(tensors=[tensor(64, (3,))])))
    with pytest.raises(gradserve.InternalError, match="a tensor without its elements, at 64"):
        arrays_in(reply, reply.message.tensors)


def test_what_follows_a_reply() -> None:
    with pytest.raises(gradserve.InternalError, match="malformed reply: expected nothing after a REPLY, got 5 bytes"):
        read(reply_of(Contents(), tensor_messages_pb2.ReadTensorsResponse()) + b"12345")


@pytest.mark.parametrize("num_bytes", [1, 2, 40])
def test_a_reply_counts_though_the_server_stops_then(num_bytes: int) -> None:
    message = status_pb2.Status(code=14, message="the server is shutting down").SerializeToString()
    farewell = FrameHeader(FrameKind.REPLY, code=14, message_bytes=len(message)).pack() + message
    replies = reply_of(Contents(), tensor_messages_pb2.ReadTensorsResponse())
    arrived = inbox()
    reply, _, _ = carry_out(call(Whole(READ), math.inf, PAYLOADS, arrived), replies + farewell[:num_bytes])
    assert isinstance(reply, Reply)
    assert not arrived.is_empty, "the connection carries no further call"


@given(st.binary(min_size=HEADER_BYTES, max_size=200))
def test_any_bytes_are_an_error_or_wait_for_more(replies: bytes) -> None:
    with pytest.raises((EndOfBytesError, gradserve.InternalError)):
        read(b"\0" + replies)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": FrameKind.CALL},
        {"kind": FrameKind.REGION},
        {"name_bytes": 5},
        {"message_bytes": 1 << 31},
        {"payload_bytes": 10},
        {"payload_bytes": 0},
        {"payload_bytes": 1 << 60},
        {"code": 5},
        {"message_bytes": 3},
    ],
    ids=str,
)
def test_headers_that_lie(fields: dict[str, Any]) -> None:
    with pytest.raises((gradserve.InternalError, EndOfBytesError)) as error:
        read(good_reply(**fields) + bytes(100))
    if isinstance(error.value, gradserve.InternalError):
        assert "malformed reply" in str(error.value)


def tensor(offset: int, shape: tuple[int, ...], dtype: int = tensor_pb2.DATA_TYPE_UINT8) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=dtype, shape=shape, payload_offset=offset)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "tensors",
    [
        [tensor(0, (300,))],
        [tensor(64, (200,))],
        [tensor(32, (10,))],
        [tensor(0, (100,)), tensor(64, (10,))],
        [tensor(0, (-1,))],
        [tensor(0, (1,), dtype=99)],
        [tensor(0, (1 << 40, 1 << 40))],
    ],
    ids=["beyond the end", "beyond it from within", "misaligned", "overlap", "negative", "unknown dtype", "overflow"],
)
def test_tensors_that_lie(tensors: list[tensor_pb2.Tensor]) -> None:
    message = tensor_messages_pb2.ReadTensorsResponse(tensors=tensors).SerializeToString()
    header = FrameHeader(FrameKind.REPLY, message_bytes=len(message), payload_bytes=256)
    with pytest.raises(gradserve.InternalError, match="malformed reply"):
        read(header.pack() + message + bytes(256))


def test_an_error() -> None:
    status = status_pb2.Status(code=3, message="no such thing")
    violation = error_details_pb2.BadRequest.FieldViolation(field="handles[1]")
    status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    message = status.SerializeToString()
    header = FrameHeader(FrameKind.REPLY, code=3, message_bytes=len(message))
    error, _, taken = read(header.pack() + message)
    assert isinstance(error, gradserve.InvalidArgumentError)
    assert (error.message, error.field) == ("no such thing", "handles[1]")
    assert taken == HEADER_BYTES + len(message)


def test_a_hello() -> None:
    welcome = socket_messages_pb2.Welcome(strand_key=b"k" * 16).SerializeToString()
    reply = FrameHeader(FrameKind.REPLY, message_bytes=len(welcome)).pack() + welcome
    answer, sent, _ = carry_out(hello(b"t" * 16, "me", PAYLOADS, inbox()), reply)
    assert answer == socket_messages_pb2.Welcome(strand_key=b"k" * 16)
    header = FrameHeader.unpack(sent[:HEADER_BYTES])
    assert (header.kind, header.number) == (FrameKind.HELLO, PROTOCOL)
    assert socket_messages_pb2.Hello.FromString(sent[HEADER_BYTES:]) == socket_messages_pb2.Hello(
        ticket=b"t" * 16, client_id="me"
    )


def test_a_hello_whose_answer_has_no_key() -> None:
    """As on Unix sockets, which have no strands, if there is no access control."""
    answer, _, _ = carry_out(hello(b"t" * 16, "me", PAYLOADS, inbox()), FrameHeader(FrameKind.REPLY).pack())
    assert answer == socket_messages_pb2.Welcome()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (FrameHeader(FrameKind.REPLY, code=5).pack(), gradserve.UnavailableError),
        (FrameHeader(FrameKind.CALL).pack(), gradserve.UnavailableError),
        (b"HTTP/1.1 400 Bad Request\r\nServer", gradserve.InternalError),
        (b"", gradserve.InternalError),
    ],
)
def test_answers_that_do_not_welcome_a_strand(answer: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        check_strand_answer(answer[:HEADER_BYTES])


def test_a_strand_is_welcome() -> None:
    check_strand_answer(FrameHeader(FrameKind.REPLY).pack())


def test_something_else_answers_a_hello() -> None:
    with pytest.raises(gradserve.InternalError, match="malformed reply"):
        carry_out(
            hello(b"t" * 16, "me", PAYLOADS, inbox()),
            b"HTTP/1.1 400 Bad Request\r\nServer: another\r\n\r\n",
        )
