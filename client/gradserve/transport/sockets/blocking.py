"""Conversations on a socket that a thread waits for.

The system calls block, with the system's own time limits (SO_RCVTIMEO): a large payload takes one call, during which
other threads run.
"""

import contextlib
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Sequence
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
from gradserve.transport.sockets.payloads import Payloads
from gradserve.transport.sockets.steps import Buffers, Conversation, Fill, Receive, Send, buffers_of
from gradserve_protocol.frames import HEADER_BYTES
from gradserve_protocol.tls import SecureSocket

T = TypeVar("T")
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

    @classmethod
    def open(cls, step: Connect, settings: ConnectionSettings) -> Self:
        """Connects to a socket, and says hello.

        Raises:
            GradserveError: Nobody is there, or the server refuses.
        """
        place = step.place
        try:
            if place.path:
                connected = _connect_unix(place.path, settings.sockets.connect)
            else:
                connected = socket.create_connection((place.host, place.port), settings.sockets.connect)
        except OSError as error:
            raise not_connected(place, error, settings) from None
        prepare(connected, settings.keepalive)
        connection = cls(cls._secured(connected, step, settings), place, step.payloads, settings)
        try:
            limit = TimeLimit(settings.sockets.hello, settings)
            greeting = hello(step.ticket, step.client_id, step.payloads, connection.inbox)
            answer = connection.converse(greeting, limit, _no_probe)
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
    def _secured(cls, connected: socket.socket, _step: Connect, _settings: ConnectionSettings) -> ConnectedSocket:
        """Returns what carries the connection on a connected socket, and owns it."""
        return connected

    def converse(self, conversation: Conversation[T], limit: TimeLimit, probe: Callable[[Place], None]) -> T:
        """Carries out a conversation; gives it up in case of an error.

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
                    case Send():
                        self.is_sending = True
                        try:
                            self._send(step, limit, probe)
                        except UnavailableError as error:
                            unsent = error  # the server may have said why it closed the connection
                        self.is_sending = False
                    case Receive():
                        answer = self._receive(step, limit, probe)
                    case Fill():
                        self._fill(step, limit)
                step = conversation.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except UnavailableError as error:
            raise unsent or error from None
        except BaseException:
            self._give_up()
            raise
        finally:
            conversation.close()

    def add_strands(self, number: int) -> None:
        """Opens strands.

        Raises:
            GradserveError: One of them cannot be opened; there are none then.
        """
        settings = self._settings.sockets
        with contextlib.ExitStack() as on_failure:
            strands = [on_failure.enter_context(socket.socket(self._socket.family)) for _ in range(number)]
            try:
                connect_all(strands, self._socket.getpeername(), settings.connect)
                for index, each in enumerate(strands):
                    each.settimeout(settings.hello)
                    each.sendall(hello_of_strand(self.strand_key, index + 1))
                for each in strands:
                    check_strand_answer(each.recv(HEADER_BYTES, _ALL))
                    each.setblocking(False)
            except OSError as error:
                raise no_strands(error) from None
            on_failure.pop_all()
        self._add_strands(strands)

    def _send(self, step: Send, limit: TimeLimit, probe: Callable[[Place], None]) -> None:
        if step.on_strands:
            return self._move_all(step, select.POLLOUT, limit, lambda: probe(self.place))
        buffers = buffers_of(step.buffers, step.progress, step.descriptor)
        while buffers.left:
            self._set_timeout(socket.SO_SNDTIMEO, limit.patience())
            try:
                buffers.advance(self._socket.sendmsg(buffers.next(), buffers.ancillary, NO_SIGNAL))
            except BlockingIOError:
                limit.left()
                probe(self.place)
            except OSError as error:
                raise self.lost(error) from None
        return None

    def _receive(self, step: Receive, limit: TimeLimit, probe: Callable[[Place], None]) -> int:
        num_bytes = 0
        while num_bytes < step.at_least:
            self._set_timeout(socket.SO_RCVTIMEO, limit.patience())
            try:
                num_bytes += self._receive_some(step.memory[num_bytes:], step.descriptors)
            except BlockingIOError:
                limit.left()
                probe(self.place)
        return num_bytes

    def _fill(self, step: Fill, limit: TimeLimit) -> None:
        if step.payload_bytes:
            limit.extend_for(step.payload_bytes)
            self.largest_reply = max(self.largest_reply, step.payload_bytes)
        if step.on_strands:
            return self._move_all(step, select.POLLIN, limit, self._stall)
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

    def _move_all(self, step: Send | Fill, event: int, limit: TimeLimit, silent: Callable[[], None]) -> None:
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
                silent()
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

    def _stall(self) -> None:
        raise self.stalled()

    def _set_timeout(self, option: int, seconds: float) -> None:
        if self._timeouts[option] != seconds:
            whole = int(seconds)
            microseconds = max(int((seconds - whole) * 1e6), 0 if whole else 1)
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole, microseconds))
            self._timeouts[option] = seconds

    def _give_up(self) -> None:
        """Tells the server that nobody awaits the reply; waits until it does not read this client's memory."""
        with contextlib.suppress(OSError):  # the connection is no more, or the server is silent
            self._socket.shutdown(socket.SHUT_WR)
            end = time.monotonic() + self._settings.sockets.giving_up
            while self.payloads.lends_memory and (left := end - time.monotonic()) > 0:
                self._set_timeout(socket.SO_RCVTIMEO, left)
                if not self._socket.recv(1 << 16):
                    self._has_ended = True
                    return


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
        return super().is_usable() and not self._socket.pending()

    def add_strands(self, number: int) -> None:
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


def _connect_unix(path: str, seconds: float) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    try:
        made.settimeout(seconds)
        made.connect(path)
    except BaseException:
        made.close()
        raise
    return made


def connect_all(sockets: Sequence[socket.socket], peer: Any, seconds: float) -> None:
    """Connects sockets at the same time; they do not block any more.

    Raises:
        OSError: One of them cannot be connected.
    """
    for each in sockets:
        each.setblocking(False)
        each.connect_ex(peer)
    for each in sockets:
        _finish_connecting(each, seconds)


def _finish_connecting(sock: socket.socket, seconds: float) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    if not poll.poll(seconds * 1e3):
        raise TimeoutError
    if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(code, os.strerror(code))


def _no_probe(_place: Place) -> None:
    """A server that does not answer a hello is given up when the time is over."""


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
