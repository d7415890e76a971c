"""Ports for servers that have to know theirs before they listen, or listen there again."""

import errno
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DYNAMIC = (49_152, 65_535)
_FIRST = 20_000
"""Ray takes ports below for its own processes."""


def free_port() -> int:
    """Returns a port of this machine that nobody listens on; see `free_ports`."""
    (port,) = free_ports(1)
    return port


def free_ports(number: int) -> list[int]:
    """Returns different ports of this machine that nobody listens on.

    They are not among those that the system gives to clients, and to servers that ask for any port: those come and go
    all the time while tests run.
    """
    first, last = map(int, _GIVEN.read_text().split()) if _GIVEN.exists() else _DYNAMIC
    ours = [port for port in range(_FIRST, 1 << 16) if not first <= port <= last]
    candidates = iter(random.SystemRandom().sample(ours, len(ours)))
    with ExitStack() as stack:
        return [_bound(candidates, stack) for _ in range(number)]


def _bound(candidates: Iterator[int], stack: ExitStack) -> int:
    for port in candidates:
        with ExitStack() as trying:
            listening = trying.enter_context(socket.socket())
            with suppress(OSError):  # somebody has it
                listening.bind(("", port))
                stack.push(trying.pop_all())
                return port
    raise OSError(errno.EADDRINUSE, "no port is free")
