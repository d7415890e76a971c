"""The choice of the way for calls to one server: its reachable sockets, or gRPC."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gradserve.errors import UnavailableError
from gradserve.results import TransportInfo
from gradserve.transport.route import Route, is_loopback
from gradserve.transport.settings import ConnectionSettings, Transport, Way
from gradserve_protocol.argument import Argument
from gradserve_protocol.memory.sealed import machine_id
from gradserve_protocol.v1 import socket_messages_pb2

_log = logging.getLogger("gradserve")
_WAYS: dict[Transport, tuple[Way, ...]] = {
    Transport.AUTO: (Way.SHARED_MEMORY, Way.BULK),
    Transport.SHARED_MEMORY: (Way.SHARED_MEMORY,),
    Transport.BULK: (Way.BULK,),
    Transport.GRPC: (),
}


@dataclass(frozen=True)
class Place:
    """The address of a socket.

    Attributes:
        way: The way of calls over it.
        host: The host of a TCP socket; empty for a Unix socket.
        port: The port of a TCP socket.
        path: The path of a Unix socket.
    """

    way: Way
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def may_be_opened(self) -> bool:
        """True unless it is a Unix socket that is not there, or not for this user."""
        return not self.path or os.access(self.path, os.W_OK)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Places:
    """The sockets of a server that may be reachable.

    Attributes:
        places: Their addresses, the fastest way first.
        reasons: Why other ways are not possible.
    """

    places: Sequence[Place]
    reasons: Sequence[str]


class Choice:
    """Decides whether to open a socket, and remembers why one cannot be used.

    Where one way is demanded, it is tried for each call. Otherwise a failure leads to gRPC, and sockets are tried again
    after a pause, which doubles with each further failure.

    Safe to use from several threads.

    Attributes:
        ways: The ways to try, the fastest first, apart from gRPC.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        server: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_in_process: bool = False,
    ) -> None:
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
        if is_in_process and not self.is_forced:
            self.ways, self._info = (), TransportInfo(Way.IN_PROCESS.value, "")
        elif not self.ways:
            self._info = TransportInfo(Way.GRPC.value, f"transport={str(transport)!r} was asked for")

    @property
    def info(self) -> TransportInfo:
        """The way in use."""
        info = self._info
        return replace(info, gpu_arrays=self._gpu_arrays) if info.way == Way.SHARED_MEMORY else info

    @property
    def is_forced(self) -> bool:
        """True if one way is demanded."""
        return self._transport is not Transport.AUTO

    def check_grpc(self, what: str) -> None:
        """Checks that gRPC may carry calls with something that only it can carry.

        Raises:
            InvalidArgumentError: Another way was demanded.
        """
        if self.is_forced:
            raise Argument("transport").error_saying(f"auto or grpc for calls of {what}", str(self._transport))

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
        if self.is_forced:
            self._info = TransportInfo(Way.GRPC.value, reason)
            message = f"transport={str(self._transport)!r} is not possible: {reason}"
            raise UnavailableError(message, code="GS_TRANSPORT", was_sent=False)
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
        if not self.is_forced:
            self.failed(reason)


def find_places(addresses: socket_messages_pb2.SocketAddresses, route: Route, ways: Sequence[Way]) -> Places:
    """Returns the sockets that may be reachable.

    Args:
        addresses: What the server says.
        route: The route of gRPC's connections to it.
        ways: The ways to consider, the fastest first.
    """
    places: list[Place] = []
    reasons: list[str] = []
    for way in ways:
        found, reason = _unix(addresses) if way is Way.SHARED_MEMORY else _tcp(addresses, route)
        places += found
        if reason:
            reasons.append(f"{way}: {reason}")
    return Places(places, reasons)


def _unix(addresses: socket_messages_pb2.SocketAddresses) -> tuple[list[Place], str]:
    if not hasattr(socket, "AF_UNIX"):
        return [], "this system has no Unix sockets"
    if not addresses.unix_path:
        return [], "the server has no socket for it"
    machine = machine_id()
    if machine and addresses.machine and machine != addresses.machine:
        return [], "the server is on another machine"
    return [Place(Way.SHARED_MEMORY, path=addresses.unix_path)], ""


def _tcp(addresses: socket_messages_pb2.SocketAddresses, route: Route) -> tuple[list[Place], str]:
    if not addresses.tcp:
        return [], "the server has no socket for it"
    if route.proxy is not None:
        return [], f"connections go through the proxy of {route.proxy}"
    host = route.address.host or "localhost"
    places = [Place(Way.BULK, each.host or host, each.port) for each in addresses.tcp]
    # The server's loopback addresses mean this machine, which is the server's only if gRPC uses one, too.
    reachable = [each for each in places if is_loopback(host) or not is_loopback(each.host)]
    if not reachable:
        return [], f"the server listens at {places[0]}, which {host} does not lead to"
    return sorted(reachable, key=lambda each: each.host != host), ""
