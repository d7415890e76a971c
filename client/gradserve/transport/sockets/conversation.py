"""Conversations of client and server on a socket, step by step: without I/O, for both transports."""

import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from gradserve.calls.exchange import Progress, Reply, Whole
from gradserve.errors import GradserveError, InternalError, UnavailableError
from gradserve.transport.channel import unary_method
from gradserve.transport.sockets.payloads import Outgoing, Payloads, num_bytes_of
from gradserve.transport.sockets.steps import Conversation, Fill, Inbox, Send
from gradserve.transport.status import error_from_reply
from gradserve_protocol.arrays import Array
from gradserve_protocol.frames import (
    CALL,
    HEADER_BYTES,
    PROTOCOL,
    REPLY,
    SEGMENT_BYTES,
    FrameError,
    FrameHeader,
    FrameKind,
    Metadata,
    name_with,
    pack_segments,
    split,
    unpack_segments,
)
from gradserve_protocol.tensors import WithContents, tensors_beside
from gradserve_protocol.v1 import socket_messages_pb2

_MAX_MESSAGE_BYTES = (1 << 31) - 1
"""The longest message of protobuf."""
_STATUSES = {code.value[0]: code for code in grpc.StatusCode}


def hello(
    ticket: bytes, client_id: str, payloads: Payloads, inbox: Inbox
) -> Conversation[socket_messages_pb2.Welcome | GradserveError]:
    """Opens the connection; returns what the server gives to it, or the server's error.

    Raises:
        InternalError: What answers does not follow the specification.
    """
    yield Send((_hello_frame(socket_messages_pb2.Hello(ticket=ticket, client_id=client_id)),))
    try:
        answer, body = yield from _receive_reply(payloads, inbox)
        inbox.check_rest()
        if answer.code:
            return _error_in(answer, body)
        return socket_messages_pb2.Welcome.FromString(bytes(body))
    except (DecodeError, FrameError) as error:
        raise _malformed(error) from None


def hello_of_strand(key: bytes, number: int) -> bytes:
    """Returns what a socket sends to become a strand of the connection with this key."""
    return _hello_frame(socket_messages_pb2.Hello(strand_key=key, strand=number))


def check_strand_answer(answer: bytes) -> None:
    """Checks what the server answers to a strand: a header and nothing else if it is welcome.

    Raises:
        GradserveError: The server refuses it.
    """
    try:
        header = FrameHeader.unpack(answer)
    except (FrameError, struct.error) as error:
        raise _malformed(error) from None
    if header.kind is not REPLY or header.code:
        raise UnavailableError(f"the server refuses them with status {header.code}")


def _hello_frame(message: socket_messages_pb2.Hello) -> bytes:
    data = message.SerializeToString()
    return FrameHeader(FrameKind.HELLO, message_bytes=len(data), number=PROTOCOL).pack() + data


def call(
    whole: Whole, seconds: float, payloads: Payloads, inbox: Inbox, num_strands: int = 0, metadata: Metadata = ()
) -> Conversation[Reply | GradserveError | None]:
    """Makes a call; returns its response, or the error that the server answered with. None: it cannot be sent here.

    Args:
        whole: The call.
        seconds: Its time limit; math.inf for none.
        payloads: The payloads of the connection.
        inbox: What arrives on the connection.
        num_strands: The number of strands over which large payloads are split.
        metadata: What the call carries beside its request.

    Raises:
        InternalError: The server's reply is malformed; the connection cannot be used any more.
    """
    unary, progress = whole.call, whole.progress
    request = unary.request
    message, contents = (request.message, request.contents) if isinstance(request, WithContents) else (request, None)
    method = unary_method(unary.service, unary.method)
    if progress is not None:
        progress.begin()
    outgoing = payloads.outgoing(contents, progress)
    try:
        while outgoing.new_regions:
            has_all = True
            for region in outgoing.new_regions:
                yield payloads.handing_over(region)
                answer, body = yield from _receive_reply(payloads, inbox)
                refusal = _error_in(answer, body) if answer.code else None
                payloads.handed_over(region, refusal)
                has_all = has_all and refusal is None
                if isinstance(refusal, UnavailableError):
                    payloads.returned()
                    return refusal  # the server ends the connection
            if has_all and contents is not None and not contents.elsewhere:
                outgoing = replace(outgoing, new_regions=())  # what was copied to them is still there
            else:
                again = payloads.outgoing(contents, progress)
                outgoing = replace(again, prefix=outgoing.prefix + again.prefix)
        if not outgoing.is_possible:
            if outgoing.prefix:
                yield Send((outgoing.prefix,))
            return None
        name = name_with(method.frame_name, metadata) if metadata else method.frame_name
        frame = _call_frame(name, message.SerializeToString(), seconds, outgoing, num_strands)
        sends = None
        if progress is not None and outgoing.following:
            progress.begin(len(frame))
            sends = progress
        if num_strands:
            own, *others = split(outgoing.following, num_strands)
            yield Send((frame, *own), None, others, sends)
        else:
            yield Send((frame, *outgoing.following), None, (), sends)
        answer, body = yield from _receive_reply(payloads, inbox)
        payloads.returned()
        if answer.code:
            reply: Reply | GradserveError = _error_in(answer, body)
        else:
            response = method.decode(bytes(body[answer.size * SEGMENT_BYTES :]))
            arrays: Mapping[int, Array] = {}
            if answer.payload_bytes or answer.size:
                arrays = yield from _receive_arrays(
                    answer, body, response, payloads, inbox, num_strands, progress, in_place=unary.in_place
                )
            reply = Reply(response, arrays)
        inbox.check_rest()
    except (DecodeError, FrameError) as error:
        raise _malformed(error) from None
    if farewells := payloads.farewells():
        yield Send((b"".join(farewells),))
    return reply


def _call_frame(name: bytes, message: bytes, seconds: float, outgoing: Outgoing, num_strands: int) -> bytes:
    """Returns the frame of a call up to its payload, and what to send before it."""
    header = FrameHeader(
        CALL,
        num_strands,
        name_bytes=len(name),
        message_bytes=len(message),
        payload_bytes=sum(map(len, outgoing.following)) if outgoing.following else 0,
        number=0 if seconds == math.inf else int(seconds * 1e6) or 1,
        size=len(outgoing.segments),
    )
    table = pack_segments(outgoing.segments) if outgoing.segments else b""
    return b"".join((outgoing.prefix, header.pack(), name, table, message))


def _receive_reply(payloads: Payloads, inbox: Inbox) -> Conversation[tuple[FrameHeader, memoryview]]:
    """Receives a REPLY up to its payload; returns its header, and its segments and message.

    These are valid until the next step.
    """
    while True:
        if inbox.num_bytes < HEADER_BYTES:
            inbox.add((yield inbox.more(HEADER_BYTES)))
        header = FrameHeader.unpack(inbox.take(HEADER_BYTES))
        if header.kind is REPLY:
            break
        payloads.notice(header, inbox.take_descriptors() if header.kind is FrameKind.REGION else ())
    if header.name_bytes:
        raise FrameError(f"expected a REPLY without a name, got {header}")
    if header.message_bytes > _MAX_MESSAGE_BYTES or (header.code and header.payload_bytes):
        raise FrameError(f"expected a message of less than 2 GiB, and no payload with an error, got {header}")
    num_bytes = header.head_bytes
    body = inbox.take(num_bytes)
    if len(body) < num_bytes:
        arrived, body = body, memoryview(bytearray(num_bytes))
        body[: len(arrived)] = arrived
        yield Fill((body[len(arrived) :],))
    return header, body


def _receive_arrays(
    answer: FrameHeader,
    body: memoryview,
    response: Any,
    payloads: Payloads,
    inbox: Inbox,
    num_strands: int,
    progress: Progress | None,
    *,
    in_place: bool,
) -> Conversation[Mapping[int, Array]]:
    """Receives the payload of a reply; returns the arrays in it, by `payload_offset`."""
    tensors = tensors_beside(response)
    if progress is not None:
        progress.receives(sum(map(num_bytes_of, tensors)))
    arrays = payloads.incoming(
        tensors,
        unpack_segments(body[: answer.size * SEGMENT_BYTES], answer),
        answer.payload_bytes,
        progress,
        in_place=in_place,
    )
    if num_strands:
        own, *others = split(arrays.buffers, num_strands)
        yield Fill(inbox.fill(own), answer.payload_bytes, others, progress)
    elif rest := inbox.fill(arrays.buffers):
        yield Fill(rest, answer.payload_bytes, (), progress)
    return arrays.by_offset


def _error_in(header: FrameHeader, body: memoryview) -> GradserveError:
    status = status_pb2.Status.FromString(bytes(body[header.size * SEGMENT_BYTES :]))
    return error_from_reply(_STATUSES.get(header.code, grpc.StatusCode.UNKNOWN), status)


def _malformed(error: Exception) -> InternalError:
    return InternalError(f"the server sent a malformed reply: {error}")
