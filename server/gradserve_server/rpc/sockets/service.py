"""SocketService: tickets for the sockets beside gRPC, and the addresses of these sockets."""

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradserve_protocol.address import Address
from gradserve_protocol.memory.sealed import machine_id
from gradserve_protocol.messages import encode_duration
from gradserve_protocol.v1 import socket_messages_pb2 as messages_pb2
from gradserve_server.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.security.identity import NO_CREDENTIALS, Credentials, PeerCertificate

TICKET_BYTES = 16
LIFETIME_SECONDS = 10.0
_MAX_TICKETS = 4096
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


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights that a ticket gives its connection.

    Attributes:
        client_id: The client that asked for the ticket.
        to_server: Whether calls may have payloads.
        to_client: Whether replies may have payloads.
        max_payload_bytes: The largest payload of one frame.
        peer: The certificate that the client showed when it asked.
        credentials: The credentials that the client showed when it asked.
    """

    client_id: str
    to_server: bool
    to_client: bool
    max_payload_bytes: int
    peer: PeerCertificate | None = None
    credentials: Credentials = NO_CREDENTIALS


class TicketRegistry:
    """Issues tickets, and accepts each of them once.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, clock: Callable[[], float], new_ticket: Callable[[int], bytes] = secrets.token_bytes) -> None:
        self._clock = clock
        self._new_ticket = new_ticket
        self._issued: OrderedDict[bytes, tuple[Grant, float]] = OrderedDict()

    def issue(self, grant: Grant) -> bytes:
        """Returns a ticket.

        Raises:
            ResourceExhaustedError: Too many tickets wait to be used.
        """
        self._forget_expired()
        if len(self._issued) >= _MAX_TICKETS:
            raise ResourceExhaustedError(
                f"too many tickets: {len(self._issued)} wait to be used, {_MAX_TICKETS} allowed", code="GS_TOO_MANY"
            )
        ticket = self._new_ticket(TICKET_BYTES)
        self._issued[ticket] = (grant, self._clock() + LIFETIME_SECONDS)
        return ticket

    def redeem(self, ticket: bytes, client_id: str, peer: PeerCertificate | None = None) -> Grant:
        """Accepts a ticket, which cannot be used again, not even by its own client.

        Args:
            ticket: The ticket.
            client_id: The client that shows it.
            peer: The certificate that it shows; None if the socket asks for none.

        Raises:
            NotFoundError: There is no such ticket for this client.
        """
        self._forget_expired()
        found = self._issued.pop(ticket, None)
        is_somebody_else = found is not None and peer is not None and peer != found[0].peer
        if (
            found is None
            or is_somebody_else
            or not hmac.compare_digest(found[0].client_id.encode(), client_id.encode())
        ):
            raise NotFoundError(
                "no such ticket: it was used, has expired, or belongs to another client or server", field="ticket"
            )
        return found[0]

    def _forget_expired(self) -> None:
        now = self._clock()
        while self._issued:
            ticket, (_, end) = next(iter(self._issued.items()))
            if end > now:
                return
            del self._issued[ticket]


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
