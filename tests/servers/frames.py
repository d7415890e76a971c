"""A client of a server's sockets that sends whatever frames a test likes."""

import array
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import grpc
from google.protobuf.message import Message
from google.rpc import status_pb2

from gradserve_protocol.frames import (
    HEADER_BYTES,
    PROTOCOL,
    FrameHeader,
    FrameKind,
    Segment,
    pack_segments,
    unpack_segments,
)
from gradserve_protocol.tensors import Contents
from gradserve_protocol.v1 import socket_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import socket_service_pb2_grpc
from tests.servers.polling import PATIENCE_SECONDS

MessageT = TypeVar("MessageT", bound=Message)


def issue_ticket(
    address: str, client_id: str = "somebody", direction: Any = 0, num_bytes: int = 0, token: str = ""
) -> messages_pb2.IssueTicketResponse:
    """Returns a ticket of the server at an address."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = socket_service_pb2_grpc.SocketServiceStub(channel)
        reply: messages_pb2.IssueTicketResponse = stub.IssueTicket(
            messages_pb2.IssueTicketRequest(client_id=client_id, direction=direction, num_bytes=num_bytes),
            metadata=(("authorization", f"Bearer {token}"),) if token else None,
        )
        return reply


@dataclass(frozen=True)
class Frame:
    """A frame that was received.

    Attributes:
        header: Its header.
        segments: The places of its payload.
        message: Its message.
        payload: What followed the message.
        descriptors: The descriptors that came with it.
    """

    header: FrameHeader
    segments: Sequence[Segment]
    message: bytes
    payload: bytes
    descriptors: Sequence[int]

    @property
    def status(self) -> status_pb2.Status:
        """The status of a REPLY that is an error."""
        return status_pb2.Status.FromString(self.message)


class FrameClient:
    """A connection to a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._held_back = b""
        sock.settimeout(PATIENCE_SECONDS)

    @classmethod
    def over_tcp(cls, ticket: messages_pb2.IssueTicketResponse) -> Self:
        """Connects to the bulk socket."""
        place = ticket.addresses.tcp[0]
        return cls(socket.create_connection((place.host or "127.0.0.1", place.port)))

    @classmethod
    def over_tls(cls, ticket: messages_pb2.IssueTicketResponse, context: ssl.SSLContext) -> Self:
        """Connects to a bulk socket that uses TLS."""
        place = ticket.addresses.tcp[0]
        connected = socket.create_connection(("127.0.0.1", place.port))
        return cls(cast("socket.socket", _Encrypted(context.wrap_socket(connected, server_hostname="localhost"))))

    @classmethod
    def over_unix(cls, ticket: messages_pb2.IssueTicketResponse) -> Self:
        """Connects to the Unix socket."""
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(ticket.addresses.unix_path)
        return cls(sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.sock.close()

    def hello(self, ticket: bytes, client_id: str = "somebody") -> Frame:
        """Shows a ticket; returns the answer."""
        message = messages_pb2.Hello(ticket=ticket, client_id=client_id).SerializeToString()
        self.send(FrameHeader(FrameKind.HELLO, message_bytes=len(message), number=PROTOCOL), message)
        return self.receive()

    def call(
        self,
        method: str,
        request: Message,
        contents: Contents | None = None,
        segments: Sequence[Segment] = (),
        seconds: float = 0.0,
        hold_back: int = 0,
    ) -> None:
        """Sends a call; the last `hold_back` bytes of its payload with `send_rest`."""
        name, message = f"gradserve.v1.{method}".encode(), request.SerializeToString()
        payload = b"".join(contents.pieces()) if contents else b""
        sent = len(payload) - hold_back
        header = FrameHeader(
            FrameKind.CALL,
            name_bytes=len(name),
            message_bytes=len(message),
            payload_bytes=len(payload),
            number=round(seconds * 1e6),
            size=len(segments),
        )
        self.send(header, name + pack_segments(segments) + message + payload[:sent])
        self._held_back = payload[sent:]

    def send_rest(self) -> None:
        """Sends what was held back of the call."""
        self.sock.sendall(self._held_back)

    def answer(self, response: type[MessageT]) -> tuple[MessageT, Frame]:
        """Returns the response to a call, and its frame, after regions that come before it."""
        frame = self.receive()
        assert frame.header.code == 0, frame.status
        return response.FromString(frame.message), frame

    def send(self, header: FrameHeader, rest: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Sends a frame."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        data = header.pack() + rest
        sent = self.sock.sendmsg([data], rights)
        if sent < len(data):
            self.sock.sendall(data[sent:])

    def receive(self) -> Frame:
        """Receives a frame.

        Raises:
            EOFError: The server has closed the connection.
        """
        data, ancillary, _, _ = self.sock.recvmsg(HEADER_BYTES, 1024)
        if not data:
            raise EOFError
        header = FrameHeader.unpack(data + self._exactly(HEADER_BYTES - len(data)))
        head = memoryview(self._exactly(header.head_bytes))
        descriptors = array.array("i")
        for _level, _kind, rights in ancillary:
            descriptors.frombytes(rights)
        places = unpack_segments(head[header.name_bytes : len(head) - header.message_bytes], header)
        message = bytes(head[len(head) - header.message_bytes :])
        return Frame(header, places, message, self._exactly(header.payload_bytes), list(descriptors))

    def is_closed_by_server(self) -> bool:
        """Waits until the server sends something, or closes; True if it closes."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True

    def _exactly(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            part = self.sock.recv(num_bytes - len(data))
            if not part:
                raise EOFError
            data += part
        return data


class _Encrypted:
    """A socket with TLS, with what clients of frames use of sockets."""

    def __init__(self, secured: ssl.SSLSocket) -> None:
        self._secured = secured

    def sendmsg(self, buffers: Sequence[bytes], _ancillary: object) -> int:
        self._secured.sendall(b"".join(buffers))
        return sum(map(len, buffers))

    def recvmsg(self, num_bytes: int, _space: int) -> tuple[bytes, list[Any], int, None]:
        return self._secured.recv(num_bytes), [], 0, None

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self._secured, how)  # without a word of TLS, as connections break

    def __getattr__(self, name: str) -> Any:
        return getattr(self._secured, name)
