"""How much there is of everything on a server, for its status and its metrics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gradserve.memory.pool import BufferPool
from gradserve.server_status import MemoryStatus
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.leases.clients import ClientLeases
from gradserve_server.rpc.listeners.sockets.fair_sockets import FairSockets
from gradserve_server.server_quotas import ServerQuotas
from gradserve_server.tensors.memories import DeviceMemory


@dataclass(frozen=True)
class ResourceCounts:
    """What there is on a server. Read on the event loop."""

    quotas: ServerQuotas
    registry: AccumulatorRegistry
    sockets: FairSockets
    clients: ClientLeases
    pool: BufferPool
    device: DeviceMemory | None

    def memory(self) -> Iterable[MemoryStatus]:
        """Returns bytes by purpose. The purposes up to "calls" share the limit of "all tensors"."""
        quotas, sockets = self.quotas, self.sockets
        found = [
            MemoryStatus("all tensors", quotas.memory.used, quotas.memory.limit),
            MemoryStatus("stored tensors", quotas.stored_memory.used),
            MemoryStatus("accumulators", quotas.accumulator_memory.used),
            MemoryStatus("layers", quotas.layer_memory.used),
            MemoryStatus("calls", quotas.call_memory.used),
            MemoryStatus("bookkeeping", quotas.bookkeeping.used, quotas.bookkeeping.limit),
            MemoryStatus("clients' shared memory", sockets.region_bytes.used, sockets.region_bytes.limit),
            MemoryStatus("kept for later", self.pool.idle_bytes),
        ]
        if self.device is not None:
            found.append(MemoryStatus("device: all", self.device.quota.used, self.device.quota.limit))
            found += [MemoryStatus(f"device: {purpose.value}", used) for purpose, used in self.device.used.items()]
        return found

    def counts(self) -> Mapping[str, tuple[int, int]]:
        """Returns how many there are of each kind, and how many there may be; 0 for no limit of its own."""
        quotas, sockets = self.quotas, self.sockets
        limited = {
            "handles": quotas.handles,
            "accumulators": self.registry.count,
            "layers": quotas.layers,
            "waiters": self.registry.waiters,
            "socket_connections": sockets.connections,
            "regions": sockets.regions,
        }
        counts = {kind: (quota.used, quota.limit) for kind, quota in limited.items()}
        return {**counts, "client_leases": (len(self.clients), 0)}
