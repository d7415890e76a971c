"""Conversations on a socket that a thread waits for.

The system calls block, with the system's own time limits (SO_RCVTIMEO): a large payload takes one call, during which
other threads run.
"""

import contextlib
import socket
import struct
import time
from collections.abc import Callable
from typing import Self, TypeVar

from gradserve.errors import UnavailableError
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.sockets.buffers import Buffers
from gradserve.transport.sockets.carrier import Connect
from gradserve.transport.sockets.connection import Connection
from gradserve.transport.sockets.conversation import Conversation, Receive, Send, hello
from gradserve.transport.sockets.opening import NO_SIGNAL, not_connected, prepare
from gradserve.transport.sockets.payloads import Payloads
from gradserve.transport.sockets.places import Place
from gradserve.transport.sockets.time_limit import TimeLimit

T = TypeVar("T")


class BlockingConnection(Connection):
    """A connection that a thread waits for."""

    def __init__(
        self, connected: socket.socket, place: Place, payloads: Payloads, settings: ConnectionSettings
    ) -> None:
        super().__init__(connected, place, payloads, settings)
        connected.setblocking(True)
        self._timeouts: dict[int, float] = {}

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
        connection = cls(connected, place, step.payloads, settings)
        try:
            limit = TimeLimit(settings.sockets.hello, settings)
            refused = connection.converse(hello(step.ticket, step.client_id, step.payloads), limit, _no_probe)
        except BaseException:
            connection.close()
            raise
        if refused is not None:
            connection.close()
            raise refused
        return connection

    def converse(self, conversation: Conversation[T], limit: TimeLimit, probe: Callable[[], None]) -> T:
        """Carries out a conversation; gives it up in case of an error.

        Args:
            conversation: The conversation.
            limit: Its time limit.
            probe: Raises UnavailableError if the server gives no sign of life.

        Raises:
            UnavailableError: The connection broke.
            DeadlineExceededError: The time is over.
        """
        unsent: UnavailableError | None = None
        try:
            while True:
                match next(conversation):
                    case Send(buffers, descriptor):
                        self.is_sending = True
                        try:
                            self._send(Buffers(buffers, descriptor), limit, probe)
                        except UnavailableError as error:
                            unsent = error  # the server may have said why it closed the connection
                        self.is_sending = False
                    case Receive() as step:
                        limit.extend_for(step.num_bytes_expected)
                        self._receive(step, limit, probe if step.may_take_long else self._stalled)
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

    def _send(self, buffers: Buffers, limit: TimeLimit, probe: Callable[[], None]) -> None:
        while buffers:
            self._set_timeout(socket.SO_SNDTIMEO, limit.patience())
            try:
                buffers.advance(self._socket.sendmsg(buffers.next(), buffers.ancillary, NO_SIGNAL))
            except BlockingIOError:
                self._ask(limit, probe)
            except OSError as error:
                raise self.lost(error) from None

    def _receive(self, step: Receive, limit: TimeLimit, probe: Callable[[], None]) -> None:
        buffers = Buffers(step.buffers)
        while buffers:
            self._set_timeout(socket.SO_RCVTIMEO, limit.patience())
            try:
                num_bytes = self._fill(buffers.next(), step.descriptors, socket.MSG_WAITALL)
            except BlockingIOError:
                self._ask(limit, probe)
                continue
            except OSError as error:
                raise self.lost(error) from None
            if not num_bytes:
                raise self.lost(None)
            buffers.advance(num_bytes)

    def _ask(self, limit: TimeLimit, probe: Callable[[], None]) -> None:
        limit.left()
        probe()

    def _stalled(self) -> None:
        raise self.stalled()

    def _set_timeout(self, option: int, seconds: float) -> None:
        if self._timeouts.get(option) != seconds:
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
                    return


def _connect_unix(path: str, seconds: float) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    try:
        made.settimeout(seconds)
        made.connect(path)
    except BaseException:
        made.close()
        raise
    return made


def _no_probe() -> None:
    """A server that does not answer a hello is given up when the time is over."""
