"""What a server holds for its clients, and gives back when they have gone."""

import gc
import os
import threading
from dataclasses import astuple, dataclass
from typing import Self

from gradserve_server.app import Server
from gradserve_server.testing import LocalServer


@dataclass(frozen=True)
class Held:
    """What a server holds for its clients."""

    memory: int
    in_flight: int
    region_bytes: int
    regions: int
    readers: int
    connections: int
    waiters: int
    handles: int
    descriptors: int
    threads: int

    def is_no_more_than(self, before: Self) -> bool:
        """True if nothing is held that was not held before."""
        return all(now <= then for now, then in zip(astuple(self), astuple(before), strict=True))


def held_by(local: LocalServer) -> Held:
    gc.collect()

    def look(server: Server) -> Held:
        context = server._sockets._context
        return Held(
            context.memory.used,
            context.in_flight.used,
            context.region_bytes.used,
            context.regions.used,
            context.readers.count,
            len(server._sockets._connections),
            server.registry.waiters.used,
            len(server.store),
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
        )

    return local.inspect(look)
