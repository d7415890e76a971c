"""Properties of connections that both transports open."""

import socket
import struct
import sys

from gradserve.errors import UnavailableError
from gradserve.transport.settings import ConnectionSettings, Keepalive
from gradserve.transport.sockets.places import Place

NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)
"""The flag of a send that must not kill a process that has not ignored SIGPIPE."""

_NUM_PROBES = 3
_MIN_RTT_OFFSET = 148
"""The place of tcpi_min_rtt, in microseconds, in struct tcp_info of Linux 4.9 and newer."""


def prepare(connected: socket.socket, keepalive: Keepalive) -> None:
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


def round_trip(connected: socket.socket) -> float:
    """Returns the shortest round trip so far, in seconds; 0 where the system does not say."""
    if connected.family == getattr(socket, "AF_UNIX", None) or not sys.platform.startswith("linux"):
        return 0.0
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_OFFSET + 4)
    microseconds: int = struct.unpack_from("@I", info, _MIN_RTT_OFFSET)[0] if len(info) > _MIN_RTT_OFFSET else 0
    return microseconds * 1e-6


def no_strands(error: Exception) -> UnavailableError:
    """Returns the error of strands of which one cannot be opened."""
    reason = "no answer in time" if isinstance(error, TimeoutError) else error
    return UnavailableError(f"no further sockets: {reason}")


def not_connected(place: Place, error: OSError, settings: ConnectionSettings) -> UnavailableError:
    """Returns the error of a socket that cannot be reached."""
    late = f"no answer within {settings.sockets.connect:g} s"
    reason = late if isinstance(error, TimeoutError) else error.strerror
    return UnavailableError(f"no connection to {place}: {reason or error}")
