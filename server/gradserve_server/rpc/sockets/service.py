"""SocketService: tickets for the sockets beside gRPC, and where these sockets are."""

from collections.abc import Sequence
from dataclasses import dataclass

from gradserve.address import Address
from gradserve.memory.sealed import machine_id
from gradserve.v1 import socket_messages_pb2 as messages_pb2
from gradserve.wire.messages import encode_duration
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.sockets.tickets import LIFETIME_SECONDS, Grant, TicketRegistry

_MAX_CLIENT_ID = 256
_ANY_BYTES = (1 << 63) - 1
_Direction = messages_pb2.IssueTicketRequest.Direction
_TO_SERVER = (_Direction.DIRECTION_UNSPECIFIED, _Direction.DIRECTION_BOTH, _Direction.DIRECTION_TO_SERVER)
_TO_CLIENT = (_Direction.DIRECTION_UNSPECIFIED, _Direction.DIRECTION_BOTH, _Direction.DIRECTION_TO_CLIENT)


@dataclass
class SocketAddresses:
    """The addresses of a server's sockets, once they are bound.

    Attributes:
        tcp: The TCP sockets. An empty host stands for the host at which the client reaches the server over gRPC.
        unix_path: The path of the Unix socket, empty if there is none.
    """

    tcp: Sequence[Address] = ()
    unix_path: str = ""

    def message(self) -> messages_pb2.SocketAddresses:
        """Returns the addresses as a message."""
        return messages_pb2.SocketAddresses(
            tcp=[messages_pb2.TcpSocket(host=each.host, port=each.port) for each in self.tcp],
            unix_path=self.unix_path,
            machine=machine_id(),
        )


class SocketServicer:
    """Issues tickets. The protos say what each method does."""

    def __init__(self, tickets: TicketRegistry, addresses: SocketAddresses) -> None:
        self._tickets = tickets
        self._addresses = addresses

    async def IssueTicket(
        self, request: messages_pb2.IssueTicketRequest, call: Call
    ) -> messages_pb2.IssueTicketResponse:
        if not 0 < len(request.client_id) <= _MAX_CLIENT_ID:
            raise InvalidArgumentError(
                f"expected 1 to {_MAX_CLIENT_ID} characters, got {len(request.client_id)}", field="client_id"
            )
        if request.direction not in (*_TO_SERVER, *_TO_CLIENT):
            raise InvalidArgumentError(f"expected a known direction, got {request.direction}", field="direction")
        if request.num_bytes < 0:
            raise InvalidArgumentError(f"expected at least 0, got {request.num_bytes}", field="num_bytes")
        grant = Grant(
            request.client_id,
            to_server=request.direction in _TO_SERVER,
            to_client=request.direction in _TO_CLIENT,
            max_payload_bytes=request.num_bytes or _ANY_BYTES,
            peer=call.peer,
            credentials=call.credentials(),
        )
        return messages_pb2.IssueTicketResponse(
            ticket=self._tickets.issue(grant),
            lifetime=encode_duration(LIFETIME_SECONDS),
            addresses=self._addresses.message(),
        )
