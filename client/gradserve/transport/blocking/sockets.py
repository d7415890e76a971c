"""The sockets of one server, for the blocking transport."""

from collections.abc import Callable
from typing import Any

from gradserve.calls.exchange import Reply, Unary, Whole
from gradserve.errors import DeadlineExceededError, UnavailableError
from gradserve.memory.regions import ClientMemory
from gradserve.results import TransportInfo
from gradserve.transport.carrying import carry_out
from gradserve.transport.route import Route
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.shown import Shown
from gradserve.transport.sockets.blocking import BlockingConnection
from gradserve.transport.sockets.carrier import AddStrands, AskForTicket, Carrier, CarrierStep, Connect
from gradserve.transport.sockets.connection import silent
from gradserve.transport.sockets.conversation import call
from gradserve.transport.sockets.places import Place
from gradserve.transport.sockets.secure_blocking import SecureBlockingConnection
from gradserve.transport.sockets.time_limit import TimeLimit
from gradserve.v1 import server_messages_pb2
from gradserve.wire.frames import Metadata

Watch = Callable[[Callable[[], object]], object]
"""A function that is told what interrupts the call that begins now, and nothing once that has ended."""


class BlockingSockets:
    """Calls over sockets, in the calling thread."""

    def __init__(
        self,
        route: Route,
        target: int,
        settings: ConnectionSettings,
        memory: ClientMemory,
        shown: Shown,
        over_grpc: Callable[[Unary, float | None], Any],
    ) -> None:
        """Takes the route to the server, its index, the client's settings and memory, and what calls over gRPC show.

        `over_grpc` takes a call and its time limit, None for none; it returns the response or raises a GradserveError.
        """
        self._carrier: Carrier[BlockingConnection] = Carrier(route, target, settings, memory, shown)
        self._is_used = self._carrier.is_used
        self._target = target
        self._settings = settings
        self._over_grpc = over_grpc

    @property
    def info(self) -> TransportInfo:
        """The way in use."""
        return self._carrier.info

    def call(self, whole: Whole, limit: TimeLimit, metadata: Metadata, watch: Watch | None) -> Reply | None:
        """Makes a call; returns None if gRPC has to carry it.

        Args:
            whole: The call.
            limit: Its time limit.
            metadata: What it carries beside its request, if the server takes that.
            watch: Told what interrupts the call, from another thread. None: nothing does but closing.
        """
        if not self._is_used:
            return None
        connection = self._carrier.idle() or carry_out(self._carrier.connect(limit), self._perform)
        if connection is None:
            return None
        try:
            if watch is not None:
                watch(self._carrier.connections.interruption(connection))
            if connection.wants_strands(whole.num_bytes):
                carry_out(self._carrier.widen(connection), self._perform)
            taken = metadata if connection.takes_metadata else ()
            conversation = call(
                whole, limit.left(), connection.payloads, connection.inbox, connection.num_strands, taken
            )
            outcome = connection.converse(conversation, limit, self._probe)
        except BaseException as error:
            self._carrier.failed(connection, error)
            raise
        return self._carrier.answered(connection, outcome)

    def introduce(self, limit: TimeLimit) -> str | None:
        """Shows the user of this client to the server; see `Introduce`."""
        return carry_out(self._carrier.introduce(limit), self._perform)

    def close(self) -> None:
        """Closes the connections; calls under way in other threads end with CallCancelledError."""
        self._carrier.connections.close()

    def _perform(self, step: CarrierStep) -> Any:
        match step:
            case AskForTicket(question, limit):
                return self._over_grpc(question, limit.timeout())
            case AddStrands(connection, number):
                return connection.add_strands(number)
            case Connect():
                return self._kind_of(step.place).open(step, self._settings)

    def _kind_of(self, place: Place) -> type[BlockingConnection]:
        is_plain = place.path or self._settings.certificates is None
        return BlockingConnection if is_plain else SecureBlockingConnection

    def _probe(self, place: Place) -> None:
        question = Unary(
            "ServerService", "GetServerInfo", server_messages_pb2.GetServerInfoRequest(), target=self._target
        )
        try:
            self._over_grpc(question, self._settings.keepalive.timeout)
        except (DeadlineExceededError, UnavailableError) as error:
            raise silent(place, error) from None
