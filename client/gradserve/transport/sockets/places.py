"""The places where a server's sockets may be, as it says, and as they can be reached from here."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from gradserve.memory.sealed import machine_id
from gradserve.transport.route import Route, is_loopback
from gradserve.transport.settings import Way
from gradserve.v1 import socket_messages_pb2


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
