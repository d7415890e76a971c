"""Reports the use of the limits: by identities, in containers, and on the device of the ops."""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import nlargest

from gradserve_protocol.messages import encode_duration
from gradserve_protocol.v1 import server_messages_pb2 as messages_pb2
from gradserve_server.devices.device import Device
from gradserve_server.resources.memory import Purpose
from gradserve_server.resources.quotas import FairQuota
from gradserve_server.security.identity import Identity
from gradserve_server.tensors.eviction import Evictor

_MOST_IDENTITIES = 1000
_MOST_CONTAINERS = 100
_MOST_COMPARED = 1000
"""The most containers to compare, because a client can make a hundred thousand."""


@dataclass(frozen=True)
class Usage:
    """The use of the quotas of a server."""

    memory: FairQuota
    handles: FairQuota
    accumulators: FairQuota
    waiters: FairQuota
    layers: FairQuota
    bookkeeping: FairQuota
    device_memory: FairQuota | None = None

    def of_all(self) -> messages_pb2.ServerUsage:
        """Returns the use by everybody."""
        return messages_pb2.ServerUsage(
            num_bytes=self.memory.used,
            num_handles=self.handles.used,
            num_accumulators=self.accumulators.used,
            num_waiters=self.waiters.used,
            num_layers=self.layers.used,
            bookkeeping_bytes=self.bookkeeping.used,
        )

    def of_identities(self, caller: Identity) -> list[messages_pb2.ShareUsage]:
        """Returns the use by the caller; for an admin of all containers, by each identity that uses anything."""
        if not caller.name:
            return []
        names = {caller.name}
        if caller.reaches_all:
            quotas = [self.memory, self.handles, self.accumulators, self.waiters, self.layers, self.bookkeeping]
            quotas += [] if self.device_memory is None else [self.device_memory]
            names = {share.name for quota in quotas for share in quota.identities if share.held}
        largest = nlargest(_MOST_IDENTITIES, names, key=self.memory.identities.held_by)
        return [self._share(name, lambda quota, name: quota.identities.held_by(name)) for name in largest]

    def of_containers(self, caller: Identity) -> list[messages_pb2.ShareUsage]:
        """Returns the use in the largest containers in which the caller has a role."""
        # Everything in a container takes some bookkeeping.
        used = self.bookkeeping.containers
        names = [name for name in used.names(_MOST_COMPARED) if caller.role_in(name) is not None and used.held_by(name)]
        largest = nlargest(_MOST_CONTAINERS, names, key=self.memory.containers.held_by)
        return [self._share(name, lambda quota, name: quota.containers.held_by(name)) for name in largest]

    def _share(self, name: str, held_by: Callable[[FairQuota, str], int]) -> messages_pb2.ShareUsage:
        return messages_pb2.ShareUsage(
            name=name,
            num_bytes=held_by(self.memory, name),
            num_handles=held_by(self.handles, name),
            num_accumulators=held_by(self.accumulators, name),
            num_waiters=held_by(self.waiters, name),
            num_layers=held_by(self.layers, name),
            bookkeeping_bytes=held_by(self.bookkeeping, name),
            device_bytes=0 if self.device_memory is None else held_by(self.device_memory, name),
        )


@dataclass(frozen=True)
class DeviceFigures:
    """The figures of the ops' device and of its memory.

    Attributes:
        device: The device.
        evictor: Keeps its memory within the limit; None for a device without memory of its own.
    """

    device: Device
    evictor: Evictor | None

    def message(self) -> messages_pb2.DeviceUsage | None:
        """Returns the figures as a message; None for the host."""
        usage = self.device.usage()
        if usage is None or self.evictor is None:
            return None
        used = self.evictor.device.used
        return messages_pb2.DeviceUsage(
            max_bytes=self.evictor.device.quota.limit,
            computing_bytes=used[Purpose.COMPUTING],
            stored_bytes=used[Purpose.STORED],
            accumulator_bytes=used[Purpose.ACCUMULATORS],
            layer_bytes=used[Purpose.LAYERS],
            cached_bytes=usage.cached_bytes,
            other_bytes=usage.other_bytes,
            num_evicted=self.evictor.num_evicted,
            evicted_bytes=self.evictor.evicted_bytes,
            num_compiled=usage.num_compiled,
            num_launches=usage.num_launches,
            bytes_to_device=usage.bytes_to_device,
            bytes_to_host=usage.bytes_to_host,
            wait=encode_duration(usage.wait_seconds),
        )
