"""The connections to one server's sockets: their pool, and the carrier that opens them and makes calls on them."""

import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from gradserve.calls.exchange import Reply, Unary, Whole
from gradserve.errors import (
    CallCancelledError,
    DeadlineExceededError,
    GradserveError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from gradserve.results import TransportInfo
from gradserve.transport.channel import CallCredentials, closed, shows_caller
from gradserve.transport.route import Route
from gradserve.transport.settings import ConnectionSettings, SocketSettings, Way
from gradserve.transport.sockets.choice import Choice, Place, find_places
from gradserve.transport.sockets.connection import Connect, Connection, TimeLimit, Watch, silent
from gradserve.transport.sockets.conversation import call
from gradserve.transport.sockets.payloads import Payloads
from gradserve.transport.sockets.region_payloads import RegionPayloads
from gradserve_protocol.frames import Metadata
from gradserve_protocol.memory.pool import ClientMemory
from gradserve_protocol.v1 import server_messages_pb2
from gradserve_protocol.v1 import socket_messages_pb2 as messages_pb2


class ConnectionPool:
    """The connections to one server. The one used last is used first; idle ones are closed after a while.

    A connection stays open while an array of a reply lies in memory of the server's. Safe to use from several threads.
    """

    def __init__(self, settings: SocketSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._clock = clock
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._num_opening = 0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    @property
    def is_closed(self) -> bool:
        """True if the client closed it."""
        return self._is_closed

    def take(self) -> Connection | None:
        """Returns an idle connection for a call, or None.

        Raises:
            CallCancelledError: The pool is closed.
        """
        with self._lock:
            if self._is_closed:
                raise closed()
            if not self._idle:
                return None
            self._close_unused()
            while self._idle:
                connection = self._idle.pop()
                if connection.is_usable():
                    self._begin_call(connection)
                    return connection
                connection.close()
        return None

    def reserve(self) -> bool:
        """Returns True if there may be another connection, which `add` or `cancel` must follow."""
        with self._lock:
            self._check_open()
            if len(self) + self._num_opening >= self._settings.max_connections:
                return False
            self._num_opening += 1
            return True

    def cancel(self) -> None:
        """Takes back a reservation."""
        with self._lock:
            self._num_opening -= 1

    def add(self, connection: Connection) -> None:
        """Adds the reserved connection, which carries a call.

        Raises:
            CallCancelledError: The pool is closed, and so is the connection now.
        """
        with self._lock:
            self._num_opening -= 1
            if self._is_closed:
                connection.close()
            self._check_open()
            self._begin_call(connection)

    def interruption(self, connection: Connection) -> Callable[[], None]:
        """Returns a function that ends the call which a connection carries now, from another thread or task.

        Once that call has ended, it does nothing: the connection may carry somebody else's.
        """
        return partial(self._interrupt, connection, connection.num_calls)

    def give_back(self, connection: Connection) -> None:
        """Makes a connection idle, whose call has ended."""
        with self._lock:
            self._busy.discard(connection)
            if self._is_closed:
                connection.close()
                return
            connection.last_used = self._clock()
            self._idle.append(connection)

    def drop(self, connection: Connection) -> None:
        """Closes a connection that cannot be used any more."""
        with self._lock:
            self._busy.discard(connection)
            connection.close()

    def drop_idle(self) -> None:
        """Closes all idle connections."""
        with self._lock:
            for each in self._idle:
                each.close()
            self._idle.clear()

    def close(self) -> None:
        """Closes idle connections, and interrupts calls on the others."""
        with self._lock:
            self._is_closed = True
            for each in self._busy:
                each.interrupt()
        self.drop_idle()

    def _begin_call(self, connection: Connection) -> None:
        connection.num_calls += 1
        self._busy.add(connection)

    def _interrupt(self, connection: Connection, number: int) -> None:
        with self._lock:
            if connection in self._busy and connection.num_calls == number:
                connection.interrupt()

    def _close_unused(self) -> None:
        latest = self._clock() - self._settings.idle
        if self._idle[0].last_used >= latest:
            return
        for each in [each for each in self._idle if each.last_used < latest and not each.payloads.reads_in_place]:
            self._idle.remove(each)
            each.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed()


_NOT_ABOUT_SOCKETS = (
    CallCancelledError,
    DeadlineExceededError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
"""Errors of a call over gRPC that say nothing about sockets."""


Ask: TypeAlias = Callable[[Unary, float | None, Metadata, Watch | None], Awaitable[Any]]
"""Makes a call over gRPC with a time limit, None for none, metadata, and a watch; raises a GradserveError."""


class ConnectionKinds(NamedTuple):
    """The classes of connections that a transport can wait for.

    Attributes:
        plain: Those that are not encrypted.
        secure: Those with TLS.
    """

    plain: type[Connection]
    secure: type[Connection]


class Carrier:
    """The sockets of one server. Safe to use from several threads."""

    def __init__(
        self,
        route: Route,
        target: int,
        settings: ConnectionSettings,
        memory: ClientMemory,
        shown: CallCredentials,
        kinds: ConnectionKinds,
        ask: Ask,
    ) -> None:
        """Takes the route to the server, its index among those of the transport, and what its connections share.

        Calls over gRPC show the key of the user, once `introduce` has got one.
        """
        self._kinds = kinds
        self._ask_over_grpc = ask
        self._settings = settings
        self._route = route
        self._shown = shown
        self._target = target
        self._server_name = route.address.host or "localhost"
        self._client_id = uuid.uuid4().hex
        self._choice = Choice(settings, str(route.address), is_in_process=bool(route.address.name))
        self._memory = memory
        self._num_strands = settings.sockets.strands
        self.connections = ConnectionPool(settings.sockets)

    def takes(self, metadata: Metadata) -> bool:
        """Returns True if a call may take a socket.

        A call that shows who makes it, by its own metadata, may not: a socket belongs to the identity that opened it.

        Raises:
            InvalidArgumentError: It may not, and a socket was demanded.
        """
        if not self._choice.ways:
            return False
        if not (metadata and shows_caller(metadata)):
            return True
        self._choice.check_grpc("metadata with the key authorization")
        return False

    @property
    def info(self) -> TransportInfo:
        """The way in use."""
        return self._choice.info

    async def call(self, whole: Whole, limit: TimeLimit, metadata: Metadata, watch: Watch | None) -> Reply | None:
        """Makes a call that may take a socket; returns None if gRPC has to carry it.

        Args:
            whole: The call.
            limit: Its time limit.
            metadata: What it carries beside its request, if the server takes that.
            watch: Told what interrupts the call, from another thread. None: nothing does but closing.
        """
        connection = self.connections.take() or await self._connect(limit, metadata, watch)
        if connection is None:
            return None
        try:
            if watch is not None:
                watch(self.connections.interruption(connection))
            if connection.wants_strands(whole.num_bytes):
                await self._widen(connection)
            taken = metadata if connection.takes_metadata else ()
            conversation = call(
                whole, limit.left(), connection.payloads, connection.inbox, connection.num_strands, taken
            )
            outcome = await connection.converse(conversation, limit, partial(self._probe, metadata))
        except BaseException as error:
            self._failed(connection, error)
            raise
        return self._answered(connection, outcome)

    def close(self) -> None:
        """Closes the connections; calls under way end with CallCancelledError."""
        self.connections.close()

    def _answered(self, connection: Connection, outcome: Reply | GradserveError | None) -> Reply | None:
        """Returns the reply of a call, and gives its connection back. None: it could not be sent there.

        Raises:
            GradserveError: The server's error, if the outcome is one.
        """
        if connection.num_calls == 1:
            self._choice.worked()
        if outcome is None or isinstance(outcome, Reply):
            self.connections.give_back(connection)
            return outcome
        if isinstance(outcome, UnavailableError):
            # The server is stopping; another one may have its place soon.
            self.connections.drop(connection)
        else:
            self.connections.give_back(connection)
        raise outcome

    def _failed(self, connection: Connection, error: BaseException) -> None:
        """Drops the connection of a call that ended with an error which is not the server's.

        Raises:
            CallCancelledError: It broke because the client was closed.
        """
        self.connections.drop(connection)
        if isinstance(error, UnavailableError):
            if self.connections.is_closed:
                raise closed() from None
            if not connection.is_interrupted:
                self.connections.drop_idle()
                self._choice.broke(error.message)
        elif isinstance(error, DeadlineExceededError) and connection.is_sending:
            self._choice.broke(f"the connection to {connection.place} stalled in the middle of a request")

    async def _connect(self, limit: TimeLimit, metadata: Metadata, watch: Watch | None) -> Connection | None:
        """Opens a connection for a call, over the fastest way that is possible; returns None if none is.

        Raises:
            GradserveError: The server cannot be reached, or the wanted way is not possible.
        """
        if not self._choice.may_open() or not self.connections.reserve():
            return None
        has_connection = False
        try:
            connection = await self._try_places(limit, metadata, watch)
            has_connection = connection is not None
        finally:
            if not has_connection:
                self.connections.cancel()
        if connection is not None:
            self.connections.add(connection)
        return connection

    async def _widen(self, connection: Connection) -> None:
        """Adds strands to a connection that wants them. If that fails, no connection gets any."""
        if not self._num_strands:
            return
        try:
            await connection.add_strands(self._num_strands)
        except GradserveError as error:
            self._num_strands = 0
            self._choice.stays_narrow(error.message)
        else:
            self._choice.widened(1 + self._num_strands)

    async def introduce(self, limit: TimeLimit, metadata: Metadata, watch: Watch | None) -> str | None:
        """Shows the user of this client to the server: opens a connection for a key; see `Introduce`.

        Raises:
            GradserveError: The server cannot be reached, or has no room.
        """
        if not self._shown.takes_key:
            return ""
        try:
            issued = await self._ask(limit, metadata, watch)
        except UnauthenticatedError:
            return ""
        found = find_places(issued.addresses, self._route, (Way.SHARED_MEMORY,))
        if not found.places:
            return found.reasons[0]
        place = found.places[0]
        time_to_open = self._half_of(limit)
        try:
            connection = await self._open(place, issued.ticket, time_to_open)
        except (UnauthenticatedError, UnavailableError) as error:
            if isinstance(error, UnavailableError) and place.may_be_opened:
                raise  # the server was there a moment ago
            return f"{place.way}: {error.message}"
        with closing(connection):
            self._shown.show_user(connection.user_key)
        return None

    async def _ask(self, limit: TimeLimit, metadata: Metadata, watch: Watch | None) -> messages_pb2.IssueTicketResponse:
        """Asks for a ticket, with the metadata of the call that needs it."""
        # Of any size: how large the replies will be is not known.
        request = messages_pb2.IssueTicketRequest(
            client_id=self._client_id, direction=messages_pb2.IssueTicketRequest.DIRECTION_BOTH
        )
        question = Unary("SocketService", "IssueTicket", request, target=self._target)
        issued: messages_pb2.IssueTicketResponse = await self._ask_over_grpc(question, limit.timeout(), metadata, watch)
        return issued

    async def _probe(self, metadata: Metadata, place: Place) -> None:
        """Raises UnavailableError if the server gives no sign of life."""
        request = server_messages_pb2.GetServerInfoRequest()
        question = Unary("ServerService", "GetServerInfo", request, target=self._target)
        try:
            await self._ask_over_grpc(question, self._settings.keepalive.timeout, metadata, None)
        except (DeadlineExceededError, UnavailableError) as error:
            raise silent(place, error) from None

    async def _open(self, place: Place, ticket: bytes, limit: TimeLimit) -> Connection:
        is_plain = place.path or self._settings.certificates is None
        kind = self._kinds.plain if is_plain else self._kinds.secure
        return await kind.open(
            Connect(place, ticket, self._client_id, self._payloads_at(place), self._server_name, limit), self._settings
        )

    def _half_of(self, limit: TimeLimit) -> TimeLimit:
        """Returns the time for an attempt to open a socket, after which there is time for the call over gRPC.

        Raises:
            DeadlineExceededError: None is left.
        """
        return TimeLimit(limit.left() / 2, self._settings)

    async def _try_places(self, limit: TimeLimit, metadata: Metadata, watch: Watch | None) -> Connection | None:
        try:
            issued = await self._ask(limit, metadata, watch)
            found = find_places(issued.addresses, self._route, self._choice.ways)
            reasons = list(found.reasons)
            for index, place in enumerate(found.places):
                if index:
                    issued = await self._ask(limit, metadata, watch)  # the server may have seen the one before
                is_last_hope = self._choice.is_forced and index + 1 == len(found.places)
                time_to_open = limit if is_last_hope else self._half_of(limit)
                try:
                    connection = await self._open(place, issued.ticket, time_to_open)
                except GradserveError as error:
                    reasons.append(f"{place.way}: {error.message}")
                else:
                    self._choice.opened(place.way, reasons)
                    return connection
        except _NOT_ABOUT_SOCKETS:
            raise
        except GradserveError as error:
            if isinstance(error, ResourceExhaustedError) and len(self.connections):
                return None  # there are enough to go on with
            reasons = [f"the server issues no tickets: {error.message}"]
        if self._choice.is_forced:
            limit.left()  # raises DeadlineExceededError: that the call had no time says nothing about the way
        self._choice.failed("; ".join(reasons))
        return None

    def _payloads_at(self, place: Place) -> Payloads:
        if place.way is Way.SHARED_MEMORY and self._memory.regions is not None:
            return RegionPayloads(
                self._memory.received,
                self._memory.regions,
                self._choice.gpu_arrays_go,
                shares_gpu=self._settings.sockets.shares_gpu,
            )
        return Payloads(self._memory.received)
