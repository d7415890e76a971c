"""The server of the HTTP port: accepts connections, reads the heads of requests and writes answers."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.observe.http.exchange import MOST_HEAD_BYTES, Answer, Exchange, HeadError, Request
from gradserve_server.observe.http.views import HEADERS, Views, refusal
from gradserve_server.runtime.files import reason_of

_MOST_BYTES = 64 << 20
HEAD_SECONDS = 10.0
"""The time limit for the handshake, and for the head of the first request."""
IDLE_SECONDS = 30.0
"""The time limit for the head of the next request after an answer."""
PIECE_SECONDS = 10.0
"""The time limit for a client to read a piece of an answer."""
ANSWER_SECONDS = 60.0
"""The time limit for a client to read an answer, or one event."""
_PIECE_BYTES = 64 << 10
_CLOSE_SECONDS = 1.0
_END_OF_HEAD = b"\r\n\r\n"
MOST_CONNECTIONS = 128
_ACCEPTED_AT_ONCE = 16
_PAUSE_SECONDS = 0.1
_QUIET_SECONDS = 60.0
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_log = logging.getLogger(__name__)


class HttpPort:
    """Serves HTTP on a socket that is already bound. Created and used on one event loop.

    A connection counts as soon as it is accepted, before its handshake. When there are too many, the oldest connection
    that waits for a request is closed.
    """

    def __init__(self, views: Views, tls: ssl.SSLContext | None) -> None:
        self._views = views
        self._tls = tls
        self._unsent = UnsentBodies()
        self._connections: dict[asyncio.Task[None], HttpConnection] = {}
        self._last_report = float("-inf")

    async def serve(self, bound: socket.socket, stop: asyncio.Event) -> None:
        """Serves requests until `stop` is set, then gives those in progress a second to end."""
        loop = asyncio.get_running_loop()
        loop.add_reader(bound, self._accept, bound)
        try:
            await stop.wait()
        finally:
            loop.remove_reader(bound)
            await self._close()

    @property
    def num_connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    def _accept(self, bound: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, _ = bound.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._report(f"cannot accept a connection: {reason_of(error)}")
                    self._pause(bound)
                    return
                continue  # the connection broke before it was accepted
            sock.setblocking(False)
            self._begin(sock)

    def _pause(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(bound)
        loop.call_later(_PAUSE_SECONDS, loop.add_reader, bound, self._accept, bound)

    def _begin(self, sock: socket.socket) -> None:
        if len(self._connections) >= MOST_CONNECTIONS and not self._make_room():
            sock.close()
            return
        connection = HttpConnection(sock, self._tls, self._views.answer, self._unsent)
        task = asyncio.create_task(connection.serve())
        self._connections[task] = connection
        task.add_done_callback(self._ended)

    def _make_room(self) -> bool:
        for task, connection in self._connections.items():
            if connection.is_waiting and not task.cancelling():
                task.cancel()
                return True
        return False

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._connections.pop(task).close()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report("a request has failed", error)

    def _report(self, text: str, error: BaseException | None = None) -> None:
        """Logs a failure at a bounded rate, because clients may cause it repeatedly."""
        now = time.monotonic()
        if now - self._last_report >= _QUIET_SECONDS:
            self._last_report = now
            _log.error("%s", text, exc_info=error)

    async def _close(self) -> None:
        for task, connection in self._connections.items():
            if connection.is_waiting:
                task.cancel()
        await self._views.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=_CLOSE_SECONDS)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)


class HttpConnection:
    """Reads the heads of requests (never bodies), and writes answers as fast as the client reads them."""

    def __init__(
        self,
        sock: socket.socket,
        tls: ssl.SSLContext | None,
        respond: Callable[[Request], Awaitable[Answer]],
        unsent: UnsentBodies,
    ) -> None:
        """Takes over an accepted socket; `respond` may raise HeadError."""
        self._sock = sock
        self._tls = tls
        self._respond = respond
        self._unsent = unsent
        self.is_waiting = True
        """True while no request is being answered, so that another connection may replace it."""

    async def serve(self) -> None:
        """Answers requests until one side ends the connection. Call `close` afterwards."""
        reader = asyncio.StreamReader(limit=MOST_HEAD_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, self._sock, ssl=self._tls)
        except (OSError, TimeoutError):
            return  # no handshake
        transport.set_write_buffer_limits(0)  # so that drain waits until everything was sent
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            seconds = HEAD_SECONDS
            while await self._exchange(reader, writer, seconds):
                seconds = IDLE_SECONDS
            await self._close(writer)
        except (OSError, TimeoutError, EOFError):
            pass  # the client has left, or is too slow
        finally:
            transport.abort()

    def close(self) -> None:
        """Closes the socket, even if `serve` never ran."""
        self._sock.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> bool:
        """Reads a request and answers it; returns False if it is the last one."""
        exchange = Exchange()
        self.is_waiting = True
        try:
            async with asyncio.timeout(seconds):
                head = await reader.readuntil(_END_OF_HEAD)
            self.is_waiting = False
            request = exchange.read(head)
            answer = await self._respond(request)
        except asyncio.LimitOverrunError:
            answer = _not_taken(HeadError(431, f"expected at most {MOST_HEAD_BYTES} bytes before the empty line"))
        except HeadError as error:
            answer = _not_taken(error)
        self.is_waiting = False
        try:
            with self._unsent.hold(answer.body):
                await self._send(writer, exchange, answer)
        except ResourceExhaustedError as error:
            await self._send(writer, exchange, refusal(error))
        finally:
            answer.end()
        return exchange.can_go_on

    async def _send(self, writer: asyncio.StreamWriter, exchange: Exchange, answer: Answer) -> None:
        writer.write(exchange.begin(answer, HEADERS))
        await self._send_body(writer, exchange, answer.body)
        if answer.more is not None:
            async for piece in answer.more:
                with self._unsent.hold(piece):
                    await self._send_body(writer, exchange, piece)
        writer.write(exchange.end())
        async with asyncio.timeout(PIECE_SECONDS):
            await writer.drain()

    async def _send_body(self, writer: asyncio.StreamWriter, exchange: Exchange, body: bytes) -> None:
        whole = memoryview(body)
        async with asyncio.timeout(ANSWER_SECONDS):
            for start in range(0, len(body), _PIECE_BYTES):
                for data in exchange.data(whole[start : start + _PIECE_BYTES]):
                    writer.write(data)
                async with asyncio.timeout(PIECE_SECONDS):
                    await writer.drain()

    @staticmethod
    async def _close(writer: asyncio.StreamWriter) -> None:
        """Closes the connection properly for TLS, if the client responds promptly."""
        writer.close()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await writer.wait_closed()


class UnsentBodies:
    """Bounds the memory of the answers being sent. One that many clients receive counts once."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._uses: dict[int, int] = {}
        self.num_bytes = 0

    @contextmanager
    def hold(self, body: bytes) -> Iterator[None]:
        """Counts a body during a block.

        Raises:
            ResourceExhaustedError: Clients have too many bytes left to read.
        """
        key = id(body)  # it lives as long as the block
        if key not in self._uses:
            if self.num_bytes + len(body) > self._most_bytes and self._uses:
                raise ResourceExhaustedError("too many answers are being sent; try again later")
            self.num_bytes += len(body)
        self._uses[key] = self._uses.get(key, 0) + 1
        try:
            yield
        finally:
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                self.num_bytes -= len(body)


def _not_taken(error: HeadError) -> Answer:
    return Answer(error.status, f"{error}\n".encode())
