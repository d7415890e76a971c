"""Properties of connections that both transports open."""

import socket
import ssl
import struct
import sys
from typing import TypeAlias

from gradserve.errors import UnavailableError
from gradserve.tls import SecureSocket
from gradserve.transport.settings import ConnectionSettings, Keepalive
from gradserve.transport.sockets.places import Place

ConnectedSocket: TypeAlias = socket.socket | SecureSocket
"""A connected socket, with or without TLS."""

NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)
"""The flag of a send that must not kill a process that has not ignored SIGPIPE."""

_NUM_PROBES = 3
_MIN_RTT_OFFSET = 148
"""The place of tcpi_min_rtt, in microseconds, in struct tcp_info of Linux 4.9 and newer."""


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


def no_strands(error: Exception) -> UnavailableError:
    """Returns the error of strands of which one cannot be opened."""
    reason = "no answer in time" if isinstance(error, TimeoutError) else error
    return UnavailableError(f"no further sockets: {reason}")


def not_connected(place: Place, error: OSError, settings: ConnectionSettings) -> UnavailableError:
    """Returns the error of a socket that cannot be reached."""
    late = f"no answer within {settings.sockets.connect:g} s"
    reason = late if isinstance(error, TimeoutError) else error.strerror
    return UnavailableError(f"no connection to {place}: {reason or error}")


def not_secured(place: Place, error: OSError) -> UnavailableError:
    """Returns the error of a handshake of TLS that failed."""
    match error:
        case TimeoutError():
            reason = "no answer in time"
        case ssl.SSLCertVerificationError():
            reason = f"the certificate of the server is not accepted: {error.verify_message}"
        case ssl.SSLError(reason="WRONG_VERSION_NUMBER" | "UNEXPECTED_MESSAGE"):
            reason = "the server does not use TLS there"
        case _:
            reason = error.strerror or str(error)
    return UnavailableError(f"no connection to {place}: {reason}")


def secured_by(settings: ConnectionSettings, connected: socket.socket, server_name: str) -> ssl.SSLSocket:
    """Returns a socket with TLS, not blocking, over a connected one, which it owns. Its handshake comes next.

    Args:
        settings: The settings, which have certificates.
        connected: The connected socket; closed in case of an error.
        server_name: The name that the server's certificate has to have.

    Raises:
        OSError: It is not connected any more.
    """
    assert settings.certificates is not None
    try:
        connected.setblocking(False)
        context = settings.certificates.current().context
        return context.wrap_socket(connected, server_hostname=server_name, do_handshake_on_connect=False)
    except BaseException:
        connected.close()
        raise
