"""A connection to one of a server's sockets."""

import array
import contextlib
import errno
import os
import select
import socket
import sys
from collections.abc import Sequence

from gradserve.errors import GradserveError, UnavailableError
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.sockets.inbox import Inbox
from gradserve.transport.sockets.opening import ConnectedSocket, prepare, round_trip
from gradserve.transport.sockets.payloads import Payloads
from gradserve.transport.sockets.places import Place
from gradserve.v1 import socket_messages_pb2

_DESCRIPTOR_SPACE = 256 if sys.platform == "win32" else socket.CMSG_SPACE(32)
_CLOSED_BY_PEER = (errno.ECONNRESET, errno.EPIPE)
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


class Connection:
    """A connected socket. Carries one call at a time.

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
        """Whether the server has closed its side. It does so only when it no longer reads this client's memory."""
        self.is_interrupted = False
        """True once `interrupt` has ended its call: that it broke says nothing about the server or the way."""
        self._socket = connected
        self._settings = settings
        self._arrivals = select.poll()
        self._arrivals.register(connected, select.POLLIN)
        self._pid = os.getpid()

    def welcome(self, answer: socket_messages_pb2.Welcome) -> None:
        """Takes note of what the server has said to the hello."""
        self.strand_key, self.user_key, self.takes_metadata = answer.strand_key, answer.user_key, answer.takes_metadata

    @property
    def num_strands(self) -> int:
        """The number of strands."""
        return len(self._strands)

    def wants_strands(self, num_bytes: int) -> bool:
        """Returns True if strands should be added now: once, for the first large payload over a long link.

        Args:
            num_bytes: The size of the tensors of the next call, as far as it is known.
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
        return UnavailableError(f"the connection to {self.place} was given up: it stalled in the middle of a reply")

    def lost(self, error: OSError | None) -> UnavailableError:
        """Notes that the connection broke; None: the server closed it. Returns the error of its call."""
        self._has_ended = self._has_ended or error is None or error.errno in _CLOSED_BY_PEER
        reason = "the server closed it" if error is None else error.strerror or str(error)
        return UnavailableError(f"the connection to {self.place} was lost: {reason}")


def silent(place: Place, error: GradserveError) -> UnavailableError:
    """Returns the error of a call whose server gives no sign of life."""
    return UnavailableError(f"the connection to {place} was given up: the server gives no sign of life ({error})")
