"""Properties of connections that both transports open."""

import socket

from gradserve.errors import UnavailableError
from gradserve.transport.settings import ConnectionSettings, Keepalive
from gradserve.transport.sockets.places import Place

NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)
"""The flag of a send that must not kill a process that has not ignored SIGPIPE."""

_NUM_PROBES = 3


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


def not_connected(place: Place, error: OSError, settings: ConnectionSettings) -> UnavailableError:
    """Returns the error of a socket that cannot be reached."""
    late = f"no answer within {settings.sockets.connect:g} s"
    reason = late if isinstance(error, TimeoutError) else error.strerror
    return UnavailableError(f"no connection to {place}: {reason or error}")
