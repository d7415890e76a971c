"""The choice of the way that calls take to one server."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from gradserve.errors import UnavailableError
from gradserve.results import TransportInfo
from gradserve.transport.settings import ConnectionSettings, Transport, Way

_WAYS: dict[Transport, tuple[Way, ...]] = {
    Transport.AUTO: (Way.SHARED_MEMORY, Way.BULK),
    Transport.SHARED_MEMORY: (Way.SHARED_MEMORY,),
    Transport.BULK: (Way.BULK,),
    Transport.GRPC: (),
}

_log = logging.getLogger("gradserve")


class Choice:
    """Decides whether to open a socket, and remembers why one cannot be used.

    Where one way is demanded, it is tried for each call. Otherwise a failure leads to gRPC, and sockets are tried again
    after a pause, which doubles with each further failure.

    Safe to use from several threads.

    Attributes:
        ways: The ways to try, the fastest first, apart from gRPC.
    """

    def __init__(self, settings: ConnectionSettings, server: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes the settings, the server's address for logs, and a monotonic clock in seconds."""
        self._transport = transport = settings.transport
        self.ways: Sequence[Way] = _WAYS[transport]
        if transport is Transport.AUTO and settings.certificates is not None:
            # Python's ssl takes a system call for each record of 16 KiB, so with TLS gRPC is often the faster one.
            self.ways = (Way.SHARED_MEMORY,)
        self._settings = settings.sockets
        self._server = server
        self._clock = clock
        self._lock = threading.Lock()
        self._pause = self._settings.first_pause
        self._next_try = -float("inf")
        self._info = TransportInfo(Way.GRPC.value, "no call was made yet")
        self._gpu_arrays = ""
        self._has_decided = False
        if not self.ways:
            self._info = TransportInfo(Way.GRPC.value, f"transport={str(transport)!r} was asked for")

    @property
    def info(self) -> TransportInfo:
        """The way in use."""
        info = self._info
        return replace(info, gpu_arrays=self._gpu_arrays) if info.way == Way.SHARED_MEMORY else info

    @property
    def _is_forced(self) -> bool:
        return self._transport is not Transport.AUTO

    def may_open(self) -> bool:
        """Returns True if a call may try to open a socket now."""
        if not self.ways:
            return False
        with self._lock:
            now = self._clock()
            if now < self._next_try:
                return False
            if self._has_decided and self._info.way == Way.GRPC:
                self._next_try = now + self._pause  # one call at a time tries again
            return True

    def opened(self, way: Way, reasons: Sequence[str]) -> None:
        """Notes that a socket is open, and why a faster one is not."""
        with self._lock:
            before, had_decided = self._info, self._has_decided
            num_sockets = before.num_sockets if before.way == way else 1
            self._info = TransportInfo(way.value, "; ".join(reasons), num_sockets)
            self._has_decided = True
            self._next_try = -float("inf")
        if not had_decided or before.way != way:
            why = f" ({self._info.why_not_faster})" if self._info.why_not_faster else ""
            _log.debug("calls to %s go by way of %s%s", self._server, way, why)

    def widened(self, num_sockets: int) -> None:
        """Notes that large payloads are split over several sockets of a connection."""
        with self._lock:
            had = self._info.num_sockets
            self._info = replace(self._info, num_sockets=num_sockets)
        if had != num_sockets:
            _log.debug("large tensors to and from %s travel over %d sockets at once", self._server, num_sockets)

    def gpu_arrays_go(self, way: str) -> None:
        """Notes how arrays of a GPU travel over shared memory."""
        with self._lock:
            before, self._gpu_arrays = self._gpu_arrays, way
        if before != way:
            _log.debug("arrays of a GPU go to %s %s", self._server, way)

    def stays_narrow(self, reason: str) -> None:
        """Notes that a connection has one socket only, although the link is long."""
        _log.info("large tensors to and from %s travel over one socket at a time: %s", self._server, reason)

    def worked(self) -> None:
        """Notes that a call on a socket was answered."""
        self._pause = self._settings.first_pause

    def failed(self, reason: str) -> None:
        """Notes that no socket can be used for some time.

        Raises:
            UnavailableError: A way was demanded.
        """
        if self._is_forced:
            self._info = TransportInfo(Way.GRPC.value, reason)
            raise UnavailableError(f"transport={str(self._transport)!r} is not possible: {reason}")
        with self._lock:
            before, had_decided = self._info, self._has_decided
            self._info = TransportInfo(Way.GRPC.value, reason)
            self._has_decided = True
            pause = self._pause
            self._next_try = self._clock() + pause
            self._pause = min(pause * 2, self._settings.longest_pause)
        if had_decided and before.way == Way.GRPC:
            _log.debug("calls to %s still go over gRPC: %s", self._server, reason)
        elif had_decided:
            _log.warning("calls to %s go over gRPC for %g s: %s", self._server, pause, reason)
        else:
            _log.info("calls to %s go over gRPC: %s", self._server, reason)

    def broke(self, reason: str) -> None:
        """Notes that a socket failed during a call; the next attempt takes gRPC unless a way was demanded."""
        if not self._is_forced:
            self.failed(reason)
