"""Connections to sockets and shared memory, of which each identity has a fair share."""

from contextlib import ExitStack

from gradserve_server.security.identity import Identity
from gradserve_server.security.shares import Shares
from gradserve_server.tensors.quotas import Quota


class FairSockets:
    """Counts the connections, and the regions of their clients. Used on the event loop only."""

    def __init__(self, max_connections: int, region_bytes: Quota, regions: Quota, reserved: float) -> None:
        """Takes the limits, and the fraction of each that is reserved for identities that use no more than that."""
        self.region_bytes = region_bytes
        self.regions = regions
        self._open = Quota(max_connections, "connections to sockets")
        self._connections = Shares(self._open, reserved, lambda limits: limits.max_connections)
        self._bytes_of = Shares(region_bytes, reserved, lambda limits: limits.max_region_bytes)
        self._regions_of = Shares(regions, reserved, lambda _: None)

    def open(self, identity: Identity) -> None:
        """Counts a connection.

        Raises:
            ResourceExhaustedError: The identity has too many.
        """
        self._connections.take(identity)
        self._open.change(1)

    def close(self, identity: Identity) -> None:
        """Counts a connection no longer."""
        self._open.change(-1)
        self._connections.give_back(identity.name)

    def add_region(self, identity: Identity, num_bytes: int) -> None:
        """Counts a region.

        Raises:
            ResourceExhaustedError: All regions together would be too large or too many, or those of the identity.
        """
        with ExitStack() as on_failure:
            self._regions_of.take(identity)
            on_failure.callback(self._regions_of.give_back, identity.name)
            self._bytes_of.take(identity, num_bytes)
            on_failure.callback(self._bytes_of.give_back, identity.name, num_bytes)
            self.regions.acquire()
            on_failure.callback(self.regions.release)
            self.region_bytes.acquire(num_bytes)
            on_failure.pop_all()

    def drop_region(self, identity: Identity, num_bytes: int) -> None:
        """Counts a region no longer."""
        self.region_bytes.release(num_bytes)
        self.regions.release()
        self._bytes_of.give_back(identity.name, num_bytes)
        self._regions_of.give_back(identity.name)
