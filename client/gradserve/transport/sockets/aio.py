"""Conversations on a socket that a task waits for. Each turn of the event loop moves a bounded number of bytes."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Self, TypeVar

from gradserve.errors import GradserveError, UnavailableError
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.sockets.carrier import Connect
from gradserve.transport.sockets.choice import Place
from gradserve.transport.sockets.connection import (
    NO_SIGNAL,
    ConnectedSocket,
    Connection,
    TimeLimit,
    no_strands,
    not_connected,
    not_secured,
    prepare,
    secured_by,
)
from gradserve.transport.sockets.conversation import check_strand_answer, hello, hello_of_strand
from gradserve.transport.sockets.steps import Buffers, Conversation, Fill, Receive, Send, buffers_of
from gradserve_protocol.frames import HEADER_BYTES
from gradserve_protocol.tls import SecureSocket

T = TypeVar("T")
_TURN_BYTES = 1 << 20


class AsyncConnection(Connection):
    """A connection that a task waits for."""

    @classmethod
    async def open(cls, step: Connect, settings: ConnectionSettings) -> Self:
        """Connects to a socket, and says hello.

        Raises:
            GradserveError: Nobody is there, or the server refuses.
        """
        place = step.place
        try:
            async with asyncio.timeout(settings.sockets.connect):
                connected = await (_connect_unix(place.path) if place.path else _connect_tcp(place.host, place.port))
        except OSError as error:
            raise not_connected(place, error, settings) from None
        prepare(connected, settings.keepalive)
        connection = cls(await cls._secured(connected, step, settings), place, step.payloads, settings)
        try:
            limit = TimeLimit(settings.sockets.hello, settings)
            greeting = hello(step.ticket, step.client_id, step.payloads, connection.inbox)
            answer = await connection.converse(greeting, limit, _no_probe)
        except BaseException:
            connection.close()
            raise
        if isinstance(answer, GradserveError):
            connection.close()
            raise answer
        connection.welcome(answer)
        connection.payloads.welcomed(answer)
        return connection

    @classmethod
    async def _secured(cls, connected: socket.socket, _step: Connect, _settings: ConnectionSettings) -> ConnectedSocket:
        """Returns what carries the connection on a connected socket, and owns it."""
        return connected

    async def converse(
        self, conversation: Conversation[T], limit: TimeLimit, probe: Callable[[Place], Awaitable[None]]
    ) -> T:
        """Carries out a conversation; gives it up in case of an error, or if the task is cancelled.

        Args:
            conversation: The conversation.
            limit: Its time limit.
            probe: Raises UnavailableError if the server, of which this is a socket, gives no sign of life.

        Raises:
            UnavailableError: The connection broke.
            DeadlineExceededError: The time is over.
        """
        unsent: UnavailableError | None = None
        try:
            step = next(conversation)
            while True:
                answer = None
                match step:
                    case Send(buffers, descriptor):
                        self.is_sending = True
                        try:
                            sent = buffers_of(buffers, step.progress, descriptor)
                            await self._move_all(step, sent, _send, limit, probe, sends=True)
                        except UnavailableError as error:
                            unsent = error  # the server may have said why it closed the connection
                        self.is_sending = False
                    case Receive():
                        answer = await self._receive(step, limit, probe)
                    case Fill(buffers, payload_bytes):
                        if payload_bytes:
                            limit.extend_for(payload_bytes)
                            self.largest_reply = max(self.largest_reply, payload_bytes)
                        filled = buffers_of(buffers, step.progress)
                        await self._move_all(step, filled, _fill, limit, self._stalled, sends=False)
                step = conversation.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except UnavailableError as error:
            raise unsent or error from None
        except BaseException:
            await self._give_up()
            raise
        finally:
            conversation.close()

    async def add_strands(self, number: int) -> None:
        """Opens strands.

        Raises:
            GradserveError: One of them cannot be opened; there are none then.
        """
        settings = self._settings.sockets
        peer = self._socket.getpeername()
        with contextlib.ExitStack() as on_failure:
            strands = [on_failure.enter_context(socket.socket(self._socket.family)) for _ in range(number)]
            try:
                async with asyncio.timeout(settings.connect + settings.hello):
                    await all_of(
                        _join(each, peer, hello_of_strand(self.strand_key, index + 1))
                        for index, each in enumerate(strands)
                    )
            except OSError as error:
                raise no_strands(error) from None
            on_failure.pop_all()
        self._add_strands(strands)

    async def _move_all(
        self,
        step: Send | Fill,
        own: Buffers,
        move: Callable[[ConnectedSocket, Buffers], int | None],
        limit: TimeLimit,
        probe: Callable[[Place], Awaitable[None]],
        *,
        sends: bool,
    ) -> None:
        """Sends or fills buffers, on the socket and its strands at the same time; see `_move`."""
        if not step.on_strands:
            return await self._move(self._socket, own, move, limit, probe, sends=sends)
        sockets = (self._socket, *self._strands)
        parts = (own, *(buffers_of(each, step.progress) for each in step.on_strands))
        return await all_of(
            self._move(sock, part, move, limit, probe, sends=sends) for sock, part in zip(sockets, parts, strict=True)
        )

    async def _move(
        self,
        sock: ConnectedSocket,
        buffers: Buffers,
        move: Callable[[ConnectedSocket, Buffers], int | None],
        limit: TimeLimit,
        probe: Callable[[Place], Awaitable[None]],
        *,
        sends: bool,
    ) -> None:
        """Sends or fills buffers; `move` returns how many bytes it moved, 0 at the end, or None if it has to wait."""
        in_turn = 0
        while buffers.left:
            try:
                num_bytes = move(sock, buffers)
            except OSError as error:
                raise self.lost(error) from None
            if num_bytes is None:
                in_turn = 0
                if not await ready(sock, limit.patience(), sends=sends):
                    limit.left()
                    await probe(self.place)
                continue
            if not num_bytes:
                raise self.lost(None)
            buffers.advance(num_bytes)
            in_turn += num_bytes
            if in_turn >= _TURN_BYTES and buffers.left:
                in_turn = 0
                await asyncio.sleep(0)

    async def _receive(self, step: Receive, limit: TimeLimit, probe: Callable[[Place], Awaitable[None]]) -> int:
        num_bytes = 0
        while num_bytes < step.at_least:
            if not await ready(self._socket, limit.patience(), sends=False):
                limit.left()
                await probe(self.place)
                continue
            try:
                num_bytes += self._receive_some(step.memory[num_bytes:], step.descriptors)
            except BlockingIOError:
                continue
        return num_bytes

    async def _stalled(self, _place: Place) -> None:
        raise self.stalled()

    async def _give_up(self) -> None:
        """Tells the server that nobody awaits the reply; waits until it does not read this client's memory."""
        with contextlib.suppress(OSError):  # the connection is no more, or the server is silent
            self._socket.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(self._settings.sockets.giving_up):
                while self.payloads.lends_memory:
                    await ready(self._socket, self._settings.sockets.giving_up, sends=False)
                    if not self._socket.recv(1 << 16):
                        self._has_ended = True
                        return


class SecureAsyncConnection(AsyncConnection):
    """An encrypted connection that a task waits for."""

    _socket: SecureSocket

    @classmethod
    async def _secured(cls, connected: socket.socket, step: Connect, settings: ConnectionSettings) -> SecureSocket:
        try:
            secured = SecureSocket(secured_by(settings, connected, step.server_name))
        except OSError as error:
            raise not_secured(step.place, error) from None
        try:
            async with asyncio.timeout(settings.sockets.hello):
                await _shake_hands(secured, settings.sockets.hello)
        except OSError as error:
            secured.close()
            raise not_secured(step.place, error) from None
        except BaseException:
            secured.close()
            raise
        return secured

    def is_usable(self) -> bool:
        return super().is_usable() and not self._socket.pending()

    async def add_strands(self, number: int) -> None:
        settings = self._settings.sockets
        peer = self._socket.getpeername()
        with contextlib.ExitStack() as on_failure:
            strands = [on_failure.enter_context(socket.socket(self._socket.family)) for _ in range(number)]
            try:
                async with asyncio.timeout(settings.connect + settings.hello):
                    await all_of(connect_to(each, peer) for each in strands)
                    secured = [
                        SecureSocket(secured_by(self._settings, each, self._socket.server_name)) for each in strands
                    ]
                    for each in secured:
                        on_failure.callback(each.close)
                    await all_of(
                        self._join(each, hello_of_strand(self.strand_key, index + 1))
                        for index, each in enumerate(secured)
                    )
            except OSError as error:
                raise no_strands(error) from None
            on_failure.pop_all()
        self._add_strands(secured)

    async def _join(self, strand: SecureSocket, greeting: bytes) -> None:
        """Makes a socket a strand.

        Raises:
            GradserveError, OSError: It did not become one.
        """
        seconds = self._settings.sockets.hello
        await _shake_hands(strand, seconds)
        strand.send(greeting)  # there is room for it
        answer = bytearray(HEADER_BYTES)
        buffers = Buffers([memoryview(answer)])
        while buffers:
            try:
                received = strand.recvmsg_into(buffers.next())[0]
            except BlockingIOError:
                if not await ready(strand, seconds, sends=False):
                    raise TimeoutError from None
                continue
            if not received:
                break
            buffers.advance(received)
        check_strand_answer(bytes(answer[: HEADER_BYTES - sum(map(len, buffers.left))]))

    async def _receive(self, step: Receive, limit: TimeLimit, probe: Callable[[Place], Awaitable[None]]) -> int:
        num_bytes = 0
        while num_bytes < step.at_least:
            try:
                num_bytes += self._receive_some(step.memory[num_bytes:], step.descriptors)
            except BlockingIOError:
                if not await ready(self._socket, limit.patience(), sends=False):
                    limit.left()
                    await probe(self.place)
        return num_bytes


async def all_of(coroutines: Iterable[Coroutine[object, object, None]]) -> None:
    """Runs coroutines at the same time until all have ended. The first error cancels the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in coroutines:
                group.create_task(each)
    except BaseExceptionGroup as errors:
        raise _first(errors) from None


async def ready(sock: ConnectedSocket, seconds: float, *, sends: bool) -> bool:
    """Waits until a socket can send or receive; returns False if it cannot for so long."""
    loop = asyncio.get_running_loop()
    add, remove = (loop.add_writer, loop.remove_writer) if sends else (loop.add_reader, loop.remove_reader)
    ready: asyncio.Future[bool] = loop.create_future()
    # asyncio describes at length a socket object that it does not know yet, so it gets the number.
    descriptor = sock.fileno()
    add(descriptor, _found_ready, ready, remove, descriptor)
    timer = loop.call_later(seconds, _settle, ready, False)
    is_ready = False
    try:
        is_ready = await ready
    finally:
        timer.cancel()
        if not is_ready:
            remove(descriptor)
    return is_ready


async def connect_to(sock: socket.socket, peer: Any) -> None:
    """Connects a socket, which does not block any more.

    Raises:
        OSError: It cannot be connected.
    """
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, peer)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _send(sock: ConnectedSocket, buffers: Buffers) -> int | None:
    try:
        return sock.sendmsg(buffers.next(_TURN_BYTES), buffers.ancillary, NO_SIGNAL)
    except BlockingIOError:
        return None


def _fill(sock: ConnectedSocket, buffers: Buffers) -> int | None:
    try:
        return sock.recvmsg_into(buffers.next(_TURN_BYTES))[0]
    except BlockingIOError:
        return None


async def _join(sock: socket.socket, peer: Any, greeting: bytes) -> None:
    """Makes a socket a strand.

    Raises:
        GradserveError, OSError: It did not become one.
    """
    loop = asyncio.get_running_loop()
    await connect_to(sock, peer)
    await loop.sock_sendall(sock, greeting)
    answer = b""
    while len(answer) < HEADER_BYTES and (part := await loop.sock_recv(sock, HEADER_BYTES - len(answer))):
        answer += part
    check_strand_answer(answer)


def _found_ready(ready: asyncio.Future[bool], remove: Callable[[int], object], descriptor: int) -> None:
    remove(descriptor)  # at once, or the loop finds it ready again before the task runs
    _settle(ready, True)


def _settle(ready: asyncio.Future[bool], value: bool) -> None:
    if not ready.done():
        ready.set_result(value)


async def _connect_unix(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    return await _connected(made, path)


async def _connect_tcp(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return await _connected(socket.socket(family, kind, protocol), address)
        except OSError as error:
            failure = error
    raise failure or OSError(f"the name {host} has no address")


async def _connected(made: socket.socket, address: Any) -> socket.socket:
    try:
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, address)
    except BaseException:
        made.close()
        raise
    return made


async def _no_probe(_place: Place) -> None:
    """A server that does not answer a hello is given up when the time is over."""


async def _shake_hands(secured: SecureSocket, seconds: float) -> None:
    """Carries out the handshake.

    Raises:
        OSError: It failed.
    """
    while True:
        try:
            return secured.shake_hands()
        except ssl.SSLWantReadError:
            is_ready = await ready(secured, seconds, sends=False)
        except ssl.SSLWantWriteError:
            is_ready = await ready(secured, seconds, sends=True)
        if not is_ready:
            raise TimeoutError
