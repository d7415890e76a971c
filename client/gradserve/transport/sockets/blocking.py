"""Conversations on a socket that a thread waits for.

The system calls block, with the system's own time limits (SO_RCVTIMEO): a large payload takes one call, during which
other threads run.
"""

import select
import socket
import ssl
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.sockets.choice import Place
from gradserve.transport.sockets.connection import (
    NO_SIGNAL,
    ConnectedSocket,
    Connection,
    Probe,
    TimeLimit,
)
from gradserve.transport.sockets.conversation import Fill, Receive, Send, buffers_of
from gradserve.transport.sockets.payloads import Payloads
from gradserve.transport.sockets.secure import SecureConnection
from gradserve_protocol.frames import Buffers
from gradserve_protocol.tls import SecureSocket

_ALL = int(socket.MSG_WAITALL)
AT_ONCE = int(getattr(socket, "MSG_DONTWAIT", 0))
"""The flag of a call that does not wait."""
_TURN_BYTES = 1 << 20
"""The most bytes moved on one of several sockets before the others get their turn."""


class BlockingConnection(Connection):
    """A connection that a thread waits for."""

    def __init__(
        self, connected: ConnectedSocket, place: Place, payloads: Payloads, settings: ConnectionSettings
    ) -> None:
        super().__init__(connected, place, payloads, settings)
        connected.setblocking(True)
        self._timeouts = {socket.SO_SNDTIMEO: 0.0, socket.SO_RCVTIMEO: 0.0}

    @staticmethod
    async def _connected(place: Place, seconds: float) -> socket.socket:
        if not place.path:
            return socket.create_connection((place.host, place.port), seconds)
        made = socket.socket(socket.AF_UNIX)
        try:
            made.settimeout(seconds)
            made.connect(place.path)
        except BaseException:
            made.close()
            raise
        return made

    @staticmethod
    async def _ready(sock: ConnectedSocket, seconds: float, *, sends: bool) -> bool:
        return _wait(sock, select.POLLOUT if sends else select.POLLIN, seconds)

    async def _send(self, step: Send, limit: TimeLimit, probe: Probe) -> None:
        if step.on_strands:
            return await self._move_all(step, select.POLLOUT, limit, probe)
        buffers = buffers_of(step.buffers, step.progress, step.descriptor)
        while buffers.left:
            self._set_timeout(socket.SO_SNDTIMEO, limit.patience())
            try:
                buffers.advance(self._socket.sendmsg(buffers.next(), buffers.ancillary, NO_SIGNAL))
            except BlockingIOError:
                limit.left()
                await probe(self.place)
            except OSError as error:
                raise self.lost(error) from None
        return None

    async def _receive(self, step: Receive, limit: TimeLimit, probe: Probe) -> int:
        num_bytes = 0
        while num_bytes < step.at_least:
            self._set_timeout(socket.SO_RCVTIMEO, limit.patience())
            try:
                num_bytes += self._receive_some(step.memory[num_bytes:], step.descriptors)
            except BlockingIOError:
                limit.left()
                await probe(self.place)
        return num_bytes

    async def _fill(self, step: Fill, limit: TimeLimit) -> None:
        if step.on_strands:
            return await self._move_all(step, select.POLLIN, limit, self._stall)
        buffers = buffers_of(step.buffers, step.progress)
        while buffers.left:
            self._set_timeout(socket.SO_RCVTIMEO, limit.patience())
            try:
                received = self._socket.recvmsg_into(buffers.next(), 0, _ALL)[0]
            except BlockingIOError:
                limit.left()
                raise self.stalled() from None
            except OSError as error:
                raise self.lost(error) from None
            if not received:
                raise self.lost(None)
            buffers.advance(received)
        return None

    async def _move_all(self, step: Send | Fill, event: int, limit: TimeLimit, silent: Probe) -> None:
        """Sends or fills buffers, on the socket and its strands at the same time.

        Args:
            step: The step, which has the buffers of the socket, and those of the strands.
            event: What to wait for: select.POLLOUT to send them, POLLIN to fill them.
            limit: The time limit.
            silent: Called after a while in which nothing has moved.
        """
        poll = select.poll()
        under_way = {}
        for sock, part in zip((self._socket, *self._strands), (step.buffers, *step.on_strands), strict=True):
            if buffers := buffers_of(part, step.progress):
                under_way[sock.fileno()] = sock, buffers
                poll.register(sock, event)
        while under_way:
            ready = poll.poll(limit.patience() * 1e3)
            if not ready:
                limit.left()
                await silent(self.place)
            for number, _ in ready:
                sock, buffers = under_way[number]
                self._move_some(sock, buffers, event)
                if not buffers:
                    poll.unregister(sock)
                    del under_way[number]

    def _move_some(self, sock: ConnectedSocket, buffers: Buffers, event: int) -> None:
        """Sends or fills what is possible without waiting."""
        try:
            if event == select.POLLOUT:
                moved = sock.sendmsg(buffers.next(_TURN_BYTES), (), NO_SIGNAL | AT_ONCE)
            else:
                moved = sock.recvmsg_into(buffers.next(_TURN_BYTES), 0, AT_ONCE)[0]
        except BlockingIOError:
            return
        except OSError as error:
            raise self.lost(error) from None
        if not moved:
            raise self.lost(None)
        buffers.advance(moved)

    async def _stall(self, _place: Place) -> None:
        raise self.stalled()

    def _set_timeout(self, option: int, seconds: float) -> None:
        if self._timeouts[option] != seconds:
            whole = int(seconds)
            microseconds = max(int((seconds - whole) * 1e6), 0 if whole else 1)
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole, microseconds))
            self._timeouts[option] = seconds


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


class SecureBlockingConnection(SecureConnection, BlockingConnection):
    """An encrypted connection that a thread waits for."""

    _socket: _WaitingSocket
    _tls = _WaitingSocket

    def _set_timeout(self, option: int, seconds: float) -> None:
        self._socket.seconds[option] = seconds

    async def _fill(self, step: Fill, limit: TimeLimit) -> None:
        if step.on_strands and self._socket.pending():
            own = buffers_of(step.buffers, step.progress)
            self._move_some(self._socket, own, select.POLLIN)
            step = step._replace(buffers=[memoryview(each) for each in own.left])
        await super()._fill(step, limit)

    def _move_some(self, sock: ConnectedSocket, buffers: Buffers, event: int) -> None:
        super()._move_some(sock, buffers, event)
        assert isinstance(sock, SecureSocket)
        # What the socket has decrypted already does not wake anybody.
        while event == select.POLLIN and buffers and sock.pending():
            super()._move_some(sock, buffers, event)


def _wait(sock: ConnectedSocket, event: int, seconds: float) -> bool:
    """Waits until a socket can send or receive; returns False if it cannot for so long."""
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(seconds * 1e3))
