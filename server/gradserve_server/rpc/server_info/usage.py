"""What is in use: of the server, by identities, and in containers."""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import nlargest

from gradserve.v1 import server_messages_pb2 as messages_pb2
from gradserve_server.resources.quotas import FairQuota
from gradserve_server.security.identity import Identity

_MOST_IDENTITIES = 1000
_MOST_CONTAINERS = 100
_MOST_LOOKED_AT = 1000
"""The containers that are looked at: a client can make a hundred thousand."""


@dataclass(frozen=True)
class Usage:
    """The quotas whose use is reported."""

    memory: FairQuota
    handles: FairQuota
    accumulators: FairQuota
    waiters: FairQuota
    layers: FairQuota
    bookkeeping: FairQuota
    device_memory: FairQuota | None = None

    def of_all(self) -> messages_pb2.ServerUsage:
        """Returns what is in use."""
        return messages_pb2.ServerUsage(
            num_bytes=self.memory.used,
            num_handles=self.handles.used,
            num_accumulators=self.accumulators.used,
            num_waiters=self.waiters.used,
            num_layers=self.layers.used,
            bookkeeping_bytes=self.bookkeeping.used,
        )

    def of_identities(self, caller: Identity) -> list[messages_pb2.ShareUsage]:
        """Returns what the caller uses; for an admin of all containers, what each identity uses that uses anything."""
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
        """Returns what the largest containers use in which the caller has a role."""
        # Whatever is in a container has some bookkeeping.
        used = self.bookkeeping.containers
        names = [
            name for name in used.names(_MOST_LOOKED_AT) if caller.role_in(name) is not None and used.held_by(name)
        ]
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
