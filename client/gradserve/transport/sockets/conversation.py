"""What client and server say to each other on a socket, step by step: without I/O, for both transports."""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2

from gradserve.calls.exchange import Reply, Unary
from gradserve.errors import GradserveError, InternalError
from gradserve.memory.regions import Region
from gradserve.transport import methods
from gradserve.transport.sockets.payloads import Outgoing, Payloads
from gradserve.transport.status import error_from_reply
from gradserve.v1 import socket_messages_pb2
from gradserve.wire.contents import Contents, WithContents, tensors_beside
from gradserve.wire.frames import (
    HEADER_BYTES,
    PROTOCOL,
    SEGMENT_BYTES,
    FrameError,
    FrameHeader,
    FrameKind,
    pack_segments,
    unpack_segments,
)

T = TypeVar("T")

_MAX_MESSAGE_BYTES = (1 << 31) - 1
"""The longest message of protobuf."""
_STATUSES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class Send:
    """A step: sends buffers, one after the other.

    Attributes:
        buffers: The buffers.
        descriptor: A descriptor to send with the first byte.
    """

    buffers: Sequence[bytes | memoryview]
    descriptor: int | None = None


@dataclass(frozen=True, slots=True)
class Receive:
    """A step: fills buffers, one after the other.

    Attributes:
        buffers: The buffers.
        num_bytes_expected: The size of the payload that begins here, for which there is more time.
        descriptors: Gets the descriptors that come with the bytes; None if none may come.
        may_take_long: Whether the server may be working before it sends them.
    """

    buffers: Sequence[memoryview]
    num_bytes_expected: int = 0
    descriptors: list[int] | None = None
    may_take_long: bool = False


Conversation: TypeAlias = Generator[Send | Receive, None, T]


def hello(ticket: bytes, client_id: str, payloads: Payloads) -> Conversation[GradserveError | None]:
    """Opens the connection; returns the server's error if it refuses.

    Raises:
        InternalError: What answers does not follow the specification.
    """
    message = socket_messages_pb2.Hello(ticket=ticket, client_id=client_id).SerializeToString()
    header = FrameHeader(FrameKind.HELLO, message_bytes=len(message), number=PROTOCOL)
    yield Send([header.pack() + message])
    try:
        answer, body = yield from _receive_reply(payloads)
        return _error_in(answer, body) if answer.code else None
    except (DecodeError, FrameError) as error:
        raise _malformed(error) from None


def call(unary: Unary, seconds: float, payloads: Payloads) -> Conversation[Reply | GradserveError]:
    """Makes a call; returns its response, or the error that the server answered with.

    Args:
        unary: The call.
        seconds: Its time limit; math.inf for none.
        payloads: The payloads of the connection.

    Raises:
        InternalError: The server's reply is malformed; the connection cannot be used any more.
    """
    message, contents = _parted(unary.request)
    outgoing = payloads.outgoing(contents)
    while outgoing.new_regions:
        for region in outgoing.new_regions:
            accepted = yield from _hand_over(region, payloads)
            payloads.handed_over(region, accepted=accepted)
        again = payloads.outgoing(contents)
        outgoing = replace(again, prefix=outgoing.prefix + again.prefix)
    try:
        return (yield from _call(unary, seconds, payloads, message, outgoing))
    except BaseException:
        payloads.abandon(outgoing)
        raise


def _hand_over(region: Region, payloads: Payloads) -> Conversation[bool]:
    header = FrameHeader(FrameKind.REGION, number=region.number, size=region.num_bytes)
    yield Send([header.pack()], region.descriptor)
    answer, _ = yield from _receive_reply(payloads)
    return not answer.code


def _call(
    unary: Unary, seconds: float, payloads: Payloads, message: Message, outgoing: Outgoing
) -> Conversation[Reply | GradserveError]:
    found = methods.unary(unary.service, unary.method)
    segments, following = outgoing.segments, outgoing.following
    name, table, data = found.path[1:].replace("/", ".").encode(), pack_segments(segments), message.SerializeToString()
    header = FrameHeader(
        FrameKind.CALL,
        name_bytes=len(name),
        message_bytes=len(data),
        payload_bytes=sum(map(len, following)),
        number=0 if seconds == math.inf else max(round(seconds * 1e6), 1),
        size=len(segments),
    )
    yield Send([b"".join((outgoing.prefix, header.pack(), name, table, data)), *following])
    try:
        answer, body = yield from _receive_reply(payloads)
        if answer.code:
            return _error_in(answer, body)
        table_bytes = answer.num_segments * SEGMENT_BYTES
        response = found.decode(bytes(body[table_bytes:]))
        arrays = payloads.incoming(
            list(tensors_beside(response)),
            unpack_segments(body[:table_bytes], answer),
            answer.payload_bytes,
            in_place=unary.in_place,
        )
    except (DecodeError, FrameError) as error:
        raise _malformed(error) from None
    if arrays.buffers:
        yield Receive(arrays.buffers, answer.payload_bytes)
    if farewells := payloads.farewells():
        yield Send([b"".join(farewells)])
    return Reply(response, arrays.by_offset)


def _parted(request: Message | WithContents) -> tuple[Message, Contents]:
    if isinstance(request, WithContents):
        return request.message, request.contents
    return request, Contents()


def _receive_reply(payloads: Payloads) -> Conversation[tuple[FrameHeader, memoryview]]:
    """Receives a REPLY up to its payload; returns its header, and its segments and message."""
    head = memoryview(bytearray(HEADER_BYTES))
    while True:
        descriptors: list[int] = []
        yield Receive([head], descriptors=descriptors if payloads.has_regions else None, may_take_long=True)
        header = FrameHeader.unpack(head)
        if header.kind is FrameKind.REPLY and not descriptors:
            break
        payloads.notice(header, descriptors)
    if header.name_bytes:
        raise FrameError(f"expected a REPLY without a name, got {header}")
    if header.message_bytes > _MAX_MESSAGE_BYTES or (header.code and header.payload_bytes):
        raise FrameError(f"expected a message of less than 2 GiB, and no payload with an error, got {header}")
    body = memoryview(bytearray(header.head_bytes))
    if body:
        yield Receive([body])
    return header, body


def _error_in(header: FrameHeader, body: memoryview) -> GradserveError:
    status = status_pb2.Status.FromString(bytes(body[header.num_segments * SEGMENT_BYTES :]))
    return error_from_reply(_STATUSES.get(header.code, grpc.StatusCode.UNKNOWN), status)


def _malformed(error: Exception) -> InternalError:
    return InternalError(f"the server sent a malformed reply: {error}")
