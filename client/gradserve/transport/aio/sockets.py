"""The sockets of one server, for the asyncio transport."""

from collections.abc import Awaitable, Callable
from typing import Any

from gradserve.calls.exchange import Reply, Unary, Whole
from gradserve.errors import DeadlineExceededError, UnavailableError
from gradserve.memory.regions import ClientMemory
from gradserve.results import TransportInfo
from gradserve.transport.carrying import carry_out_async
from gradserve.transport.route import Route
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.shown import Shown
from gradserve.transport.sockets.aio import AsyncConnection
from gradserve.transport.sockets.carrier import AddStrands, AskForTicket, Carrier, CarrierStep, Connect
from gradserve.transport.sockets.connection import silent
from gradserve.transport.sockets.conversation import call
from gradserve.transport.sockets.places import Place
from gradserve.transport.sockets.secure_aio import SecureAsyncConnection
from gradserve.transport.sockets.time_limit import TimeLimit
from gradserve.v1 import server_messages_pb2
from gradserve.wire.frames import Metadata


class AsyncSockets:
    """Calls over sockets, in the awaiting task."""

    def __init__(
        self,
        route: Route,
        target: int,
        settings: ConnectionSettings,
        memory: ClientMemory,
        shown: Shown,
        over_grpc: Callable[[Unary, float | None], Awaitable[Any]],
    ) -> None:
        """Takes the route to the server, its index, the client's settings and memory, and what calls over gRPC show.

        `over_grpc` takes a call and its time limit, None for none; it returns the response or raises a GradserveError.
        """
        self._carrier: Carrier[AsyncConnection] = Carrier(route, target, settings, memory, shown)
        self._is_used = self._carrier.is_used
        self._target = target
        self._settings = settings
        self._over_grpc = over_grpc

    @property
    def info(self) -> TransportInfo:
        """The way in use."""
        return self._carrier.info

    async def call(self, whole: Whole, limit: TimeLimit, metadata: Metadata) -> Reply | None:
        """Makes a call; returns None if gRPC has to carry it.

        Args:
            whole: The call.
            limit: Its time limit.
            metadata: What it carries beside its request, if the server takes that.
        """
        if not self._is_used:
            return None
        connection = self._carrier.idle() or await carry_out_async(self._carrier.connect(limit), self._perform)
        if connection is None:
            return None
        try:
            if connection.wants_strands(whole.num_bytes):
                await carry_out_async(self._carrier.widen(connection), self._perform)
            taken = metadata if connection.takes_metadata else ()
            conversation = call(
                whole, limit.left(), connection.payloads, connection.inbox, connection.num_strands, taken
            )
            outcome = await connection.converse(conversation, limit, self._probe)
        except BaseException as error:
            self._carrier.failed(connection, error)
            raise
        return self._carrier.answered(connection, outcome)

    async def introduce(self, limit: TimeLimit) -> str | None:
        """Shows the user of this client to the server; see `Introduce`."""
        return await carry_out_async(self._carrier.introduce(limit), self._perform)

    def close(self) -> None:
        """Closes the connections; calls under way end with CallCancelledError."""
        self._carrier.connections.close()

    async def _perform(self, step: CarrierStep) -> Any:
        match step:
            case AskForTicket(question, limit):
                return await self._over_grpc(question, limit.timeout())
            case AddStrands(connection, number):
                return await connection.add_strands(number)
            case Connect():
                return await self._kind_of(step.place).open(step, self._settings)

    def _kind_of(self, place: Place) -> type[AsyncConnection]:
        is_plain = place.path or self._settings.certificates is None
        return AsyncConnection if is_plain else SecureAsyncConnection

    async def _probe(self, place: Place) -> None:
        question = Unary(
            "ServerService", "GetServerInfo", server_messages_pb2.GetServerInfoRequest(), target=self._target
        )
        try:
            await self._over_grpc(question, self._settings.keepalive.timeout)
        except (DeadlineExceededError, UnavailableError) as error:
            raise silent(place, error) from None
