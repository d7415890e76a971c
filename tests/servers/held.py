"""What a server holds for its clients, and gives back when they have gone."""

import gc
import threading
from dataclasses import astuple, dataclass
from typing import Self

from gradserve_server.app import Server
from gradserve_testing import LocalServer
from tests.servers.descriptors import open_files
from tests.servers.polling import eventually


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
    sockets: int
    memory_files: int
    threads: int

    def is_no_more_than(self, before: Self) -> bool:
        """True if nothing is held that was not held before."""
        return all(now <= then for now, then in zip(astuple(self), astuple(before), strict=True))


def held_by(local: LocalServer) -> Held:
    eventually(lambda: local.inspect(_has_all_its_own))
    gc.collect()

    def look(server: Server) -> Held:
        context = server.sockets.context
        files = list(open_files())
        return Held(
            context.memory.used,
            context.in_flight.used,
            context.fair.region_bytes.used,
            context.fair.regions.used,
            context.readers.count,
            len(server.sockets.connections),
            server.registry.factory.waiters.used,
            len(server.store),
            sum(each.startswith("socket:") for each in files),
            sum(each.startswith("/memfd:") for each in files),
            threading.active_count(),
        )

    return local.inspect(look)


def _has_all_its_own(server: Server) -> bool:
    """True when the thread of the HTTP port, which begins after everything else, has its event loop."""
    return server.observation.address is None or server.observation.is_served
