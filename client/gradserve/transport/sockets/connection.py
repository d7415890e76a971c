"""A connection to one of a server's sockets: its state, time limits, and the options and errors of sockets."""

import array
import contextlib
import errno
import math
import os
import select
import socket
import struct
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias, TypeVar

from gradserve.errors import DeadlineExceededError, GradserveError, UnavailableError
from gradserve.transport.settings import ConnectionSettings, Keepalive
from gradserve.transport.sockets.choice import Place
from gradserve.transport.sockets.conversation import (
    Conversation,
    Fill,
    Inbox,
    Receive,
    Send,
    check_strand_answer,
    hello,
    hello_of_strand,
)
from gradserve.transport.sockets.payloads import Payloads
from gradserve_protocol.frames import HEADER_BYTES
from gradserve_protocol.tls import SecureSocket

ConnectedSocket: TypeAlias = socket.socket | SecureSocket
"""A connected socket, with or without TLS."""
NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)
"""The flag of a send that must not kill a process that has not ignored SIGPIPE."""
_NUM_PROBES = 3
_MIN_RTT_OFFSET = 148
"""The place of tcpi_min_rtt, in microseconds, in struct tcp_info of Linux 4.9 and newer."""
_DESCRIPTOR_SPACE = 256 if sys.platform == "win32" else socket.CMSG_SPACE(32)
_CLOSED_BY_PEER = (errno.ECONNRESET, errno.EPIPE)
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


T = TypeVar("T")
Watch: TypeAlias = Callable[[Callable[[], object]], object]
"""A function that gets what interrupts the call that begins now, and None once that has ended."""
Probe: TypeAlias = Callable[[Place], Awaitable[None]]
"""Raises UnavailableError if the server with a socket at this place gives no sign of life."""


@dataclass(frozen=True)
class Connect:
    """The opening of a connection.

    Attributes:
        place: The socket.
        ticket: The ticket.
        client_id: The client's id.
        payloads: The payloads of the connection.
        server_name: The name that the server's certificate has to have, if the connection is encrypted: that of gRPC.
        limit: The time for all of it.
    """

    place: Place
    ticket: bytes
    client_id: str
    payloads: Payloads
    server_name: str
    limit: "TimeLimit"


class TimeLimit:
    """The time limit of one call."""

    def __init__(
        self, seconds: float | None, settings: ConnectionSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = math.inf if seconds is None else seconds
        self._clock = clock
        self._end = clock() + self._seconds
        self._settings = settings
        self._interval = settings.keepalive.interval

    def left(self) -> float:
        """Returns how many seconds are left, math.inf for no limit.

        Raises:
            DeadlineExceededError: None are.
        """
        left = self._end - self._clock()
        if left <= 0:
            raise DeadlineExceededError(f"Deadline Exceeded: there was no answer within {self._seconds:.3g} s")
        return left

    def at_most(self, seconds: float) -> float:
        """Returns `seconds`, or how many are left if those are fewer.

        Raises:
            DeadlineExceededError: None are left.
        """
        return min(seconds, self.left())

    def timeout(self) -> float | None:
        """Returns how many seconds are left, None for no limit, also when none are."""
        return None if self._end == math.inf else max(self._end - self._clock(), 0.0)

    def patience(self) -> float:
        """Returns how many seconds to wait for the next bytes before the server is asked for a sign of life.

        Raises:
            DeadlineExceededError: The time is over.
        """
        if self._end - self._clock() >= self._interval:
            return self._interval
        return self.left()

    def extend_for(self, num_bytes: int) -> None:
        """Adds the time that a payload takes on a slow network."""
        self._end = max(self._end, self._clock()) + self._settings.times.transfer(num_bytes)


class Connection(ABC):
    """A connected socket. Carries one call at a time.

    A subclass waits for it: in the calling thread, or in a task.

    Attributes:
        place: The socket's address.
        payloads: The payloads of its frames.
        inbox: What has arrived.
        num_calls: The number of calls that it has carried, with that which it carries.
        last_used: When it became idle, by a monotonic clock.
        is_sending: Whether a request is on its way.
        strand_key: The key that opens strands; empty if the connection cannot have any.
        user_key: The key with which calls over gRPC show the user; empty if the server gives none.
        takes_metadata: Whether the server takes metadata with a call.
        largest_reply: The size of the largest payload that was received.
    """

    def __init__(
        self, connected: ConnectedSocket, place: Place, payloads: Payloads, settings: ConnectionSettings
    ) -> None:
        self.place = place
        self.payloads = payloads
        self.inbox = Inbox(takes_descriptors=payloads.has_regions)
        self.num_calls = 0
        self.last_used = 0.0
        self.is_sending = False
        self.strand_key = b""
        self.user_key = ""
        self.takes_metadata = False
        self.largest_reply = 0
        self._strands: list[ConnectedSocket] = []
        self._has_decided = False
        self._has_ended = False
        """True once the server has closed its side. It does so only when it no longer reads this client's memory."""
        self.is_interrupted = False
        """True once `interrupt` has ended its call: that it broke says nothing about the server or the way."""
        self._socket = connected
        self._settings = settings
        self._arrivals = select.poll()
        self._arrivals.register(connected, select.POLLIN)
        self._pid = os.getpid()

    @classmethod
    async def open(cls, step: Connect, settings: ConnectionSettings) -> Self:
        """Connects to a socket, and says hello.

        Raises:
            GradserveError: Nobody is there, or the server refuses.
        """
        place, seconds = step.place, step.limit.at_most(settings.sockets.connect)
        try:
            connected = await cls._connected(place, seconds)
        except OSError as error:
            raise not_connected(place, error, seconds) from None
        prepare(connected, settings.keepalive)
        connection = cls(await cls._secured(connected, step, settings), place, step.payloads, settings)
        try:
            limit = TimeLimit(step.limit.at_most(settings.sockets.hello), settings)
            greeting = hello(step.ticket, step.client_id, step.payloads, connection.inbox)
            answer = await connection.converse(greeting, limit, _no_probe)
        except BaseException:
            connection.close()
            raise
        if isinstance(answer, GradserveError):
            connection.close()
            raise answer
        connection.strand_key, connection.user_key = answer.strand_key, answer.user_key
        connection.takes_metadata = answer.takes_metadata
        connection.payloads.welcomed(answer)
        return connection

    async def converse(self, conversation: Conversation[T], limit: TimeLimit, probe: Probe) -> T:
        """Carries out a conversation; gives it up in case of an error, or if its task is cancelled.

        Args:
            conversation: The conversation.
            limit: Its time limit.
            probe: Asks the server for a sign of life if nothing comes.

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
                            await self._send(step, limit, probe)
                        except UnavailableError as error:
                            unsent = error  # the server may have said why it closed the connection
                        self.is_sending = False
                    case Receive():
                        answer = await self._receive(step, limit, probe)
                    case Fill():
                        if step.payload_bytes:
                            limit.extend_for(step.payload_bytes)
                            self.largest_reply = max(self.largest_reply, step.payload_bytes)
                        await self._fill(step, limit)
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
        with contextlib.ExitStack() as on_failure:
            sockets = [on_failure.enter_context(socket.socket(self._socket.family)) for _ in range(number)]
            strands: list[ConnectedSocket] = []
            try:
                peer = self._socket.getpeername()
                for each in sockets:
                    each.setblocking(False)
                    each.connect_ex(peer)
                end = time.monotonic() + settings.connect
                for each in sockets:
                    await self._finish_connecting(each, end)
                end = time.monotonic() + settings.hello
                for index, each in enumerate(sockets):
                    strand = await self._strand(each, end)
                    on_failure.callback(strand.close)
                    strand.send(hello_of_strand(self.strand_key, index + 1))  # there is room for it
                    strands.append(strand)
                for strand in strands:
                    check_strand_answer(await self._received(strand, HEADER_BYTES, end))
            except OSError as error:
                raise no_strands(error) from None
            on_failure.pop_all()
        self._add_strands(strands)

    @property
    def num_strands(self) -> int:
        """The number of strands."""
        return len(self._strands)

    def wants_strands(self, num_bytes: int) -> bool:
        """Returns True if strands should be added now: once, for the first large payload over a long link.

        Args:
            num_bytes: The known size of the tensors of the next call.
        """
        settings = self._settings.sockets
        if self._has_decided or max(num_bytes, self.largest_reply) < settings.large_payload:
            return False
        self._has_decided = True
        return bool(self.strand_key) and settings.strands > 0 and round_trip(self._socket) >= settings.long_round_trip

    def is_usable(self) -> bool:
        """Returns True if an idle connection can carry a call: the server has neither closed it nor sent anything."""
        return self.inbox.is_empty and not self._arrivals.poll(0)

    def interrupt(self) -> None:
        """Ends the call that another thread or task makes on it, which must not have ended: see `ConnectionPool`."""
        self.is_interrupted = True
        self._shut_down()

    def _shut_down(self) -> None:
        for each in (self._socket, *self._strands):
            with contextlib.suppress(OSError):  # it is not connected any more
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes it. The server notices at once, even if forks of this process have it open, too.

        What was lent for a call without an answer is taken back, unless the server no longer reads it.
        """
        if os.getpid() == self._pid:
            self._shut_down()
        for each in (self._socket, *self._strands):
            each.close()
        self.inbox.close()
        if self._has_ended and not self.is_interrupted:
            self.payloads.returned()
        else:
            self.payloads.withdraw()

    def _add_strands(self, strands: Sequence[ConnectedSocket]) -> None:
        """Takes over the sockets that have become strands."""
        for each in strands:
            prepare(each, self._settings.keepalive)
            self._arrivals.register(each, select.POLLIN)
        self._strands += strands

    @staticmethod
    @abstractmethod
    async def _connected(place: Place, seconds: float) -> socket.socket:
        """Returns a socket that is connected to a place.

        Raises:
            OSError: It cannot be connected in time.
        """

    @staticmethod
    @abstractmethod
    async def _ready(sock: ConnectedSocket, seconds: float, *, sends: bool) -> bool:
        """Waits until a socket can send or receive; returns False if it cannot for so long."""

    @abstractmethod
    async def _send(self, step: Send, limit: TimeLimit, probe: Probe) -> None: ...

    @abstractmethod
    async def _receive(self, step: Receive, limit: TimeLimit, probe: Probe) -> int: ...

    @abstractmethod
    async def _fill(self, step: Fill, limit: TimeLimit) -> None: ...

    @classmethod
    async def _secured(cls, connected: socket.socket, _step: Connect, _settings: ConnectionSettings) -> ConnectedSocket:
        """Returns what carries the connection on a connected socket, and owns it."""
        return connected

    async def _strand(self, connected: socket.socket, _end: float) -> ConnectedSocket:
        """Returns what carries a strand on a connected socket, and owns it."""
        return connected

    @classmethod
    async def _wait_until(cls, end: float, sock: ConnectedSocket, *, sends: bool) -> None:
        """Waits until a socket can send or receive.

        Raises:
            TimeoutError: It cannot until the end, by a monotonic clock.
        """
        if not await cls._ready(sock, max(end - time.monotonic(), 0.0), sends=sends):
            raise TimeoutError

    async def _finish_connecting(self, sock: socket.socket, end: float) -> None:
        await self._wait_until(end, sock, sends=True)
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(code, os.strerror(code))

    async def _received(self, sock: ConnectedSocket, num_bytes: int, end: float) -> bytes:
        """Returns so many bytes, or fewer if the server closes the socket."""
        received = b""
        while len(received) < num_bytes:
            try:
                part = sock.recv(num_bytes - len(received))
            except BlockingIOError:
                await self._wait_until(end, sock, sends=False)
                continue
            if not part:
                break
            received += part
        return received

    async def _give_up(self) -> None:
        """Tells the server that nobody awaits the reply; waits until it does not read this client's memory."""
        with contextlib.suppress(OSError):  # the connection is no more, or the server is silent
            self._socket.shutdown(socket.SHUT_WR)
            end = time.monotonic() + self._settings.sockets.giving_up
            while self.payloads.lends_memory:
                await self._wait_until(end, self._socket, sends=False)
                if not self._socket.recv(1 << 16):
                    self._has_ended = True
                    return

    def _receive_some(self, memory: memoryview, descriptors: list[int] | None) -> int:
        """Receives what there is; returns how many bytes came.

        Raises:
            BlockingIOError: There is nothing yet.
            UnavailableError: The connection broke, or the server closed it.
        """
        ancillary: list[tuple[int, int, bytes]] = []
        try:
            if descriptors is None:
                num_bytes = self._socket.recv_into(memory)
            else:
                num_bytes, ancillary, _, _ = self._socket.recvmsg_into((memory,), _DESCRIPTOR_SPACE, _CLOSE_ON_EXEC)
        except BlockingIOError:
            raise
        except OSError as error:
            raise self.lost(error) from None
        if not num_bytes:
            raise self.lost(None)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                assert descriptors is not None, "otherwise none are received"
                descriptors += received
        return num_bytes

    def stalled(self) -> UnavailableError:
        """Returns the error of a reply of which nothing more comes."""
        return UnavailableError(
            f"the connection to {self.place} was given up: it stalled in the middle of a reply",
            code="GS_CONNECTION_LOST",
        )

    def lost(self, error: OSError | None) -> UnavailableError:
        """Notes that the connection broke; None: the server closed it. Returns the error of its call."""
        self._has_ended = self._has_ended or error is None or error.errno in _CLOSED_BY_PEER
        reason = "the server closed it" if error is None else error.strerror or str(error)
        return UnavailableError(f"the connection to {self.place} was lost: {reason}", code="GS_CONNECTION_LOST")


async def _no_probe(_place: Place) -> None:
    """A server that does not answer a hello is given up when the time is over."""


def prepare(connected: ConnectedSocket, keepalive: Keepalive) -> None:
    """Sets the options of a connected socket; the system then notices within `keepalive` when the other end is gone."""
    if connected.family == getattr(socket, "AF_UNIX", None):
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", keepalive.interval), ("TCP_KEEPINTVL", keepalive.timeout / _NUM_PROBES)):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), max(round(seconds), 1))
    if hasattr(socket, "TCP_KEEPCNT"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)


def round_trip(connected: ConnectedSocket) -> float:
    """Returns the shortest round trip so far, in seconds; 0 where the system does not say."""
    if connected.family == getattr(socket, "AF_UNIX", None) or not sys.platform.startswith("linux"):
        return 0.0
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_OFFSET + 4)
    microseconds: int = struct.unpack_from("@I", info, _MIN_RTT_OFFSET)[0] if len(info) > _MIN_RTT_OFFSET else 0
    return microseconds * 1e-6


def not_connected(place: Place, error: OSError, seconds: float) -> UnavailableError:
    """Returns the error of a socket that cannot be reached within some seconds."""
    late = f"no answer within {seconds:.3g} s"
    reason = late if isinstance(error, TimeoutError) else error.strerror
    return UnavailableError(f"no connection to {place}: {reason or error}", code="GS_NO_CONNECTION")


def no_strands(error: Exception) -> UnavailableError:
    """Returns the error of strands of which one cannot be opened."""
    reason = "no answer in time" if isinstance(error, TimeoutError) else getattr(error, "message", error)
    return UnavailableError(f"no further sockets: {reason}")


def silent(place: Place, error: GradserveError) -> UnavailableError:
    """Returns the error of a call whose server gives no sign of life."""
    return UnavailableError(
        f"the connection to {place} was given up: the server gives no sign of life ({error.message})",
        code="GS_CONNECTION_LOST",
    )
