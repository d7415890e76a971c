"""One connection to the HTTP port: one exchange after the other."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress

from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.observe.http.exchange import MOST_HEAD_BYTES, Answer, Exchange, HeadError, Request
from gradserve_server.observe.http.guard import HEADERS
from gradserve_server.observe.http.unsent import UnsentBodies
from gradserve_server.observe.http.views import refusal

HEAD_SECONDS = 10.0
"""How long the handshake and the head of the first request may take."""
IDLE_SECONDS = 30.0
"""How long after an answer the head of the next request may take."""
PIECE_SECONDS = 10.0
"""How long a client may take to read a piece of an answer."""
ANSWER_SECONDS = 60.0
"""How long a client may take to read an answer, or one event."""
_PIECE_BYTES = 64 << 10
_CLOSE_SECONDS = 1.0
_END_OF_HEAD = b"\r\n\r\n"


class HttpConnection:
    """Reads the heads of requests, and nothing else, and writes answers as fast as the client reads them."""

    def __init__(
        self,
        sock: socket.socket,
        tls: ssl.SSLContext | None,
        respond: Callable[[Request], Awaitable[Answer]],
        unsent: UnsentBodies,
    ) -> None:
        """Takes over an accepted socket.

        Args:
            sock: The socket.
            tls: The certificates; None if it is not encrypted.
            respond: Returns the answer to a request; raises HeadError.
            unsent: Counts the answers that are being sent.
        """
        self._sock = sock
        self._tls = tls
        self._respond = respond
        self._unsent = unsent
        self.is_waiting = True
        """True while no request is being answered, so that it may make way for another connection."""

    async def serve(self) -> None:
        """Answers requests until one side has had enough. Expects `close` afterwards."""
        reader = asyncio.StreamReader(limit=MOST_HEAD_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, self._sock, ssl=self._tls)
        except (OSError, TimeoutError):
            return  # no handshake
        transport.set_write_buffer_limits(0)  # to drain is to wait until the client's system has everything
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
        """Closes the socket, which a task that was cancelled at once never did."""
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
        """Ends the connection as TLS wants it, if the client takes part at once."""
        writer.close()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await writer.wait_closed()


def _not_taken(error: HeadError) -> Answer:
    return Answer(error.status, f"{error}\n".encode())
