"""Connections with TLS that a task waits for."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable

from gradserve.tls import SecureSocket
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.sockets.aio import AsyncConnection, connect_to, ready
from gradserve.transport.sockets.all_of import all_of
from gradserve.transport.sockets.buffers import Buffers
from gradserve.transport.sockets.carrier import Connect
from gradserve.transport.sockets.conversation import check_strand_answer, hello_of_strand
from gradserve.transport.sockets.opening import no_strands, not_secured, secured_by
from gradserve.transport.sockets.places import Place
from gradserve.transport.sockets.steps import Receive
from gradserve.transport.sockets.time_limit import TimeLimit
from gradserve.wire.frames import HEADER_BYTES


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
        """See `Connection`."""
        return super().is_usable() and not self._socket.pending()

    async def add_strands(self, number: int) -> None:
        """See `AsyncConnection`."""
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
