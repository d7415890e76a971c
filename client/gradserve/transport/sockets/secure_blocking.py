"""Connections with TLS that a thread waits for."""

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Iterable, Sequence
from typing import Any

from gradserve.tls import SecureSocket
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.sockets.blocking import AT_ONCE, BlockingConnection, connect_all
from gradserve.transport.sockets.buffers import Buffers, buffers_of
from gradserve.transport.sockets.carrier import Connect
from gradserve.transport.sockets.conversation import check_strand_answer, hello_of_strand
from gradserve.transport.sockets.opening import ConnectedSocket, no_strands, not_secured, secured_by
from gradserve.transport.sockets.steps import Fill
from gradserve.transport.sockets.time_limit import TimeLimit
from gradserve.wire.frames import HEADER_BYTES


class _WaitingSocket(SecureSocket):
    """A socket with TLS that waits within time limits, as a blocking socket does with SO_RCVTIMEO.

    Attributes:
        seconds: How long it waits at most, by the name of the system's option; then BlockingIOError is raised.
    """

    def __init__(self, secured: ssl.SSLSocket) -> None:
        super().__init__(secured)
        self.seconds = {socket.SO_SNDTIMEO: 0.0, socket.SO_RCVTIMEO: 0.0}

    def recv_into(self, memory: memoryview) -> int:
        while True:
            try:
                return super().recv_into(memory)
            except BlockingIOError:
                if not _wait(self, select.POLLIN, self.seconds[socket.SO_RCVTIMEO]):
                    raise

    def recvmsg_into(
        self, buffers: Iterable[bytes | memoryview], space: int = 0, flags: int = 0
    ) -> tuple[int, list[Any], int, None]:
        while True:
            try:
                return super().recvmsg_into(buffers, space, flags)
            except BlockingIOError:
                if flags & AT_ONCE or not _wait(self, select.POLLIN, self.seconds[socket.SO_RCVTIMEO]):
                    raise

    def sendmsg(
        self, buffers: Sequence[bytes | memoryview], ancillary: Sequence[tuple[int, int, Any]] = (), flags: int = 0
    ) -> int:
        while True:
            try:
                return super().sendmsg(buffers, ancillary, flags)
            except BlockingIOError:
                if flags & AT_ONCE or not _wait(self, select.POLLOUT, self.seconds[socket.SO_SNDTIMEO]):
                    raise


class SecureBlockingConnection(BlockingConnection):
    """An encrypted connection that a thread waits for."""

    _socket: _WaitingSocket

    @classmethod
    def _secured(cls, connected: socket.socket, step: Connect, settings: ConnectionSettings) -> SecureSocket:
        try:
            secured = _WaitingSocket(secured_by(settings, connected, step.server_name))
        except OSError as error:
            raise not_secured(step.place, error) from None
        try:
            _shake_hands(secured, settings.sockets.hello)
        except OSError as error:
            secured.close()
            raise not_secured(step.place, error) from None
        return secured

    def is_usable(self) -> bool:
        """See `Connection`."""
        return super().is_usable() and not self._socket.pending()

    def add_strands(self, number: int) -> None:
        """See `BlockingConnection`."""
        settings = self._settings.sockets
        with contextlib.ExitStack() as on_failure:
            strands = [on_failure.enter_context(socket.socket(self._socket.family)) for _ in range(number)]
            try:
                connect_all(strands, self._socket.getpeername(), settings.connect)
                secured = []
                for index, each in enumerate(strands):
                    strand = SecureSocket(secured_by(self._settings, each, self._socket.server_name))
                    on_failure.callback(strand.close)
                    secured.append(strand)
                    _shake_hands(strand, settings.hello)
                    strand.send(hello_of_strand(self.strand_key, index + 1))  # there is room for it
                for strand in secured:
                    check_strand_answer(_received(strand, HEADER_BYTES, settings.hello))
            except OSError as error:
                raise no_strands(error) from None
            on_failure.pop_all()
        self._add_strands(secured)

    def _set_timeout(self, option: int, seconds: float) -> None:
        self._socket.seconds[option] = seconds

    def _fill(self, step: Fill, limit: TimeLimit) -> None:
        if step.on_strands and self._socket.pending():
            own = buffers_of(step.buffers, step.progress)
            self._move_some(self._socket, own, select.POLLIN)
            step = step._replace(buffers=[memoryview(each) for each in own.left])
        super()._fill(step, limit)

    def _move_some(self, sock: ConnectedSocket, buffers: Buffers, event: int) -> None:
        super()._move_some(sock, buffers, event)
        assert isinstance(sock, SecureSocket)
        # What the socket has decrypted already does not wake anybody.
        while event == select.POLLIN and buffers and sock.pending():
            super()._move_some(sock, buffers, event)


def _shake_hands(secured: SecureSocket, seconds: float) -> None:
    """Carries out the handshake.

    Raises:
        OSError: It failed.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            return secured.shake_hands()
        except ssl.SSLWantReadError:
            event = select.POLLIN
        except ssl.SSLWantWriteError:
            event = select.POLLOUT
        if not _wait(secured, event, max(end - time.monotonic(), 0.0)):
            raise TimeoutError


def _received(secured: SecureSocket, num_bytes: int, seconds: float) -> bytes:
    """Returns so many bytes, or fewer at the end."""
    received = b""
    while len(received) < num_bytes:
        try:
            part = secured.recv(num_bytes - len(received))
        except BlockingIOError:
            if not _wait(secured, select.POLLIN, seconds):
                raise TimeoutError from None
            continue
        if not part:
            break
        received += part
    return received


def _wait(secured: SecureSocket, event: int, seconds: float) -> bool:
    """Waits until a socket can send or receive; returns False if it cannot for so long."""
    poll = select.poll()
    poll.register(secured, event)
    return bool(poll.poll(seconds * 1e3))
