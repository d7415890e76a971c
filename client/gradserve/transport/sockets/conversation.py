"""Conversations of client and server on a socket, as steps that a transport performs: without I/O."""

import math
import os
import struct
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from gradserve.calls.exchange import Progress, Reply, Whole
from gradserve.errors import GradserveError, InternalError, UnavailableError
from gradserve.transport.channel import unary_method
from gradserve.transport.sockets.payloads import Outgoing, Payloads, num_bytes_of
from gradserve.transport.status import error_from_reply
from gradserve_protocol.arrays import Array
from gradserve_protocol.frames import (
    CALL,
    HEADER_BYTES,
    PROTOCOL,
    REPLY,
    SEGMENT_BYTES,
    Buffers,
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
_PIECE_BYTES = 1 << 20
"""The most bytes of a system call if progress is reported."""
_NUM_BYTES = 1 << 15
"""Room for a small reply, header and message, so that one system call receives it."""
_FAREWELL = bytes((FrameKind.REPLY, grpc.StatusCode.UNAVAILABLE.value[0]))
"""The first bytes of the frame with which a server ends a connection."""
T = TypeVar("T")
_STATUSES = {code.value[0]: code for code in grpc.StatusCode}


class Send(NamedTuple):
    """Sends buffers, one after the other. Answered by None.

    Attributes:
        buffers: The buffers.
        descriptor: A descriptor to send with the first byte.
        on_strands: What to send on strands at the same time.
        progress: Told how many bytes were sent.
    """

    buffers: Sequence[bytes | memoryview]
    descriptor: int | None = None
    on_strands: Sequence[Sequence[bytes | memoryview]] = ()
    progress: Progress | None = None


class Receive(NamedTuple):
    """Receives what comes, for which the server may have to work first. Answered by the number of bytes.

    Attributes:
        memory: Where to put it.
        at_least: The number of bytes to wait for.
        descriptors: Gets the descriptors that come with the bytes; None if none may come.
    """

    memory: memoryview
    at_least: int
    descriptors: list[int] | None = None


class Fill(NamedTuple):
    """Fills buffers with the rest of a frame, one after the other. Answered by None.

    Attributes:
        buffers: The buffers.
        payload_bytes: The size of the payload that begins here, for which there is more time.
        on_strands: The buffers to fill from strands at the same time.
        progress: Told how many bytes were received.
    """

    buffers: Sequence[memoryview]
    payload_bytes: int = 0
    on_strands: Sequence[Sequence[memoryview]] = ()
    progress: Progress | None = None


Step: TypeAlias = Send | Receive | Fill
Conversation: TypeAlias = Generator[Step, Any, T]


class ReportedBuffers(Buffers):
    """Buffers that tell how many bytes were sent or filled, and are moved piece by piece for this."""

    def __init__(
        self, buffers: Iterable[bytes | memoryview], progress: Progress, descriptor: int | None = None
    ) -> None:
        super().__init__(buffers, descriptor)
        self._progress = progress

    def next(self, num_bytes: int | None = None) -> list[bytes | memoryview]:
        return super().next(_PIECE_BYTES if num_bytes is None else min(num_bytes, _PIECE_BYTES))

    def advance(self, num_bytes: int) -> None:
        """Takes away the next bytes, and reports their number to the progress.

        Raises:
            CallbackError: The callback of the progress has raised an exception.
        """
        super().advance(num_bytes)
        self._progress.moved(num_bytes)


def buffers_of(
    buffers: Iterable[bytes | memoryview], progress: Progress | None, descriptor: int | None = None
) -> Buffers:
    """Returns buffers to send or fill, which tell `progress` about it if there is one."""
    if progress is None:
        return Buffers(buffers, descriptor)
    return ReportedBuffers(buffers, progress, descriptor)


class Inbox:
    """The bytes that have arrived on a connection, until a frame takes them.

    Attributes:
        num_bytes: How many there are.
    """

    def __init__(self, *, takes_descriptors: bool) -> None:
        """Takes whether descriptors may come with the bytes."""
        self.num_bytes = 0
        self._start = 0
        self._memory = memoryview(bytearray(_NUM_BYTES))
        self._descriptors: list[int] = []
        self._received_descriptors = self._descriptors if takes_descriptors else None

    def more(self, num_bytes: int) -> Receive:
        """Returns the step after which there are at least so many bytes; `add` must follow it."""
        if self._start:
            self._memory[: self.num_bytes] = self._memory[self._start : self._start + self.num_bytes]
            self._start = 0
        return Receive(self._memory[self.num_bytes :], num_bytes - self.num_bytes, self._received_descriptors)

    def add(self, num_bytes: int) -> None:
        """Notes how many bytes a step received."""
        self.num_bytes += num_bytes

    def take(self, num_bytes: int) -> memoryview:
        """Takes the first bytes, or all if there are fewer. They are valid until the next step."""
        start = self._start
        if num_bytes < self.num_bytes:
            self.num_bytes -= num_bytes
            self._start = end = start + num_bytes
        else:
            end = start + self.num_bytes
            self.num_bytes = self._start = 0
        return self._memory[start:end]

    def fill(self, buffers: Iterable[memoryview]) -> list[memoryview]:
        """Moves what there is into buffers; returns those, or parts of them, that remain to be filled."""
        rest = []
        for each in buffers:
            taken = self.take(len(each))
            each[: len(taken)] = taken
            if len(taken) < len(each):
                rest.append(each[len(taken) :])
        return rest

    def take_descriptors(self) -> list[int]:
        """Takes all descriptors; the caller closes them."""
        taken = self._descriptors[:]
        self._descriptors.clear()
        return taken

    @property
    def is_empty(self) -> bool:
        """True if nothing has come after the frames that were taken."""
        return not self.num_bytes and not self._descriptors

    def check_rest(self) -> None:
        """Checks that nothing has come after the frames that were taken, but the farewell of a server that stops.

        Raises:
            FrameError: Something else has.
        """
        rest = bytes(self._memory[self._start : self._start + min(self.num_bytes, len(_FAREWELL))])
        if self._descriptors or not _FAREWELL.startswith(rest):
            raise FrameError(f"expected nothing after a REPLY, got {self.num_bytes} bytes")

    def close(self) -> None:
        """Closes descriptors that nobody has taken."""
        for each in self.take_descriptors():
            os.close(each)


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
                frame, descriptor = payloads.handing_over(region)
                yield Send((frame,), descriptor)
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
