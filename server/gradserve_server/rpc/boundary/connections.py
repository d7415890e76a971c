"""Ends connections of gRPC, which has no call for that."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Collection, Iterator
from urllib.parse import quote

DESCRIPTORS = "/proc/self/fd" if os.path.exists("/proc/self/fd") else "/dev/fd"
"""The folder with the descriptors of this process."""
_MAPPED = "::ffff:"
"""The beginning of an IPv4 address as a socket for both versions shows it."""


class Connections:
    """Ends TCP connections of this process by the names that gRPC gives to their clients, such as ipv4:10.0.0.7:51234.

    What gRPC's core has buffered for a connection is freed when the connection ends, and its calls are cancelled. An
    asyncio server can end neither a call of which the status is sent nor a connection. So their sockets are shut down.
    Connections over Unix sockets have no names; nothing ends them.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def end(self, peers: Collection[str]) -> None:
        """Ends the connections of clients, in a thread: it looks at all descriptors of the process."""
        named = frozenset(each for each in peers if not each.startswith("unix:"))
        if not named:
            return
        task = asyncio.create_task(asyncio.to_thread(shut_down, named))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def shut_down(peers: Collection[str]) -> None:
    """Shuts down the sockets that are connected to clients."""
    for sock in _sockets():
        with sock, contextlib.suppress(OSError):
            if sock.family in (socket.AF_INET, socket.AF_INET6) and _name(sock) in peers:
                sock.shutdown(socket.SHUT_RDWR)


def clients_of(ports: Collection[int]) -> list[str]:
    """Returns the names of the clients that are connected to some TCP ports of this process."""
    names = []
    for sock in _sockets():
        with sock, contextlib.suppress(OSError):
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] in ports:
                names.append(_name(sock))
    return names


def _sockets() -> Iterator[socket.socket]:
    """Yields the sockets of this process, with descriptors of their own."""
    for number in os.listdir(DESCRIPTORS):
        with contextlib.suppress(OSError):  # closed meanwhile, or no socket
            descriptor = os.dup(int(number))
            try:
                sock = socket.socket(fileno=descriptor)
            except OSError:
                os.close(descriptor)
                raise
            yield sock


def _name(sock: socket.socket) -> str:
    """Returns the name that gRPC gives to the client of a socket."""
    host, port = sock.getpeername()[:2]
    if sock.family == socket.AF_INET or host.startswith(_MAPPED):
        return f"ipv4:{host.removeprefix(_MAPPED)}:{port}"
    return f"ipv6:{quote(f'[{host}]', safe=':')}:{port}"
