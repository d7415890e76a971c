"""Connections to sockets and shared memory, of which each identity has a fair share."""

from contextlib import ExitStack

from gradserve_server.resources.quotas import Quota
from gradserve_server.security.identity import Identity
from gradserve_server.security.shares import ShareRules, Shares


class FairSockets:
    """Counts the connections, and the regions of their clients. Used on the event loop only."""

    def __init__(
        self, max_connections: int, region_bytes: Quota, gpu_bytes: Quota, regions: Quota, rules: ShareRules
    ) -> None:
        """Takes the limits, of regions of the host and of a GPU, and how much of each an identity may have."""
        self.region_bytes = region_bytes
        self.gpu_bytes = gpu_bytes
        self.regions = regions
        self.connections = Quota(max_connections, "connections to sockets")
        self.strands = Quota(max_connections, "strands of connections to sockets")
        self._connections = Shares(self.connections, rules, lambda limits: limits.max_connections)
        self._bytes_of = Shares(region_bytes, rules, lambda limits: limits.max_region_bytes)
        self._gpu_bytes_of = Shares(gpu_bytes, rules, lambda _: None)
        self._regions_of = Shares(regions, rules, lambda _: None)

    def open(self, identity: Identity) -> None:
        """Counts a connection.

        Raises:
            ResourceExhaustedError: The identity has too many.
        """
        self._connections.of(identity).take()
        self.connections.change(1)

    def close(self, identity: Identity) -> None:
        """Counts a connection no longer."""
        self.connections.change(-1)
        self._connections.of(identity).give_back()

    def add_region(self, identity: Identity, num_bytes: int, *, on_gpu: bool = False) -> None:
        """Counts a region.

        Raises:
            ResourceExhaustedError: All regions together would be too large or too many, or those of the identity.
        """
        with ExitStack() as on_failure:
            quota, shares = self._memory(on_gpu=on_gpu)
            regions, region_bytes = self._regions_of.of(identity), shares.of(identity)
            regions.take()
            on_failure.callback(regions.give_back)
            region_bytes.take(num_bytes)
            on_failure.callback(region_bytes.give_back, num_bytes)
            self.regions.acquire()
            on_failure.callback(self.regions.release)
            quota.acquire(num_bytes)
            on_failure.pop_all()

    def drop_region(self, identity: Identity, num_bytes: int, *, on_gpu: bool = False) -> None:
        """Counts a region no longer."""
        quota, shares = self._memory(on_gpu=on_gpu)
        quota.release(num_bytes)
        self.regions.release()
        shares.of(identity).give_back(num_bytes)
        self._regions_of.of(identity).give_back()

    def _memory(self, *, on_gpu: bool) -> tuple[Quota, Shares]:
        return (self.gpu_bytes, self._gpu_bytes_of) if on_gpu else (self.region_bytes, self._bytes_of)
