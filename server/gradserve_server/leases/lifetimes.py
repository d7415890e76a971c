"""The lifetimes of all resources of a server."""

from collections.abc import Callable

from gradserve_server.leases.clients import Client, ClientLeases, Delete, End, Owned
from gradserve_server.leases.lease import Lease, LeaseQueue
from gradserve_server.leases.lifetime import Lifetime
from gradserve_server.leases.turn import Turn


class Life:
    """The life of one resource, from its creation to its end. Made by `Lifetimes.begin`.

    Attributes:
        lifetime: The leases that can end it.
    """

    def __init__(self, lifetime: Lifetime, leases: tuple[Lease[End], ...], end: Callable[[], object]) -> None:
        self.lifetime = lifetime
        self._leases = leases
        self._end = end

    def renew(self) -> None:
        """Renews the leases after a use."""
        for lease in self._leases:
            lease.renew()

    def begin_use(self) -> None:
        """Keeps the resource alive until as many uses have ended as have begun."""
        for lease in self._leases:
            lease.begin_use()

    def end_use(self) -> None:
        """Ends a use."""
        for lease in self._leases:
            lease.end_use()

    def end(self) -> None:
        """Ends the life of a resource that was deleted."""
        self._end()


class Lifetimes:
    """Deletes resources whose leases have ended.

    Attributes:
        client_lease_seconds: The length of the leases of clients.
        clients: The leases of clients.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, clock: Callable[[], float], client_lease_seconds: float) -> None:
        """Takes a monotonic clock in seconds, and the length of the leases of clients."""
        self._queue: LeaseQueue[End] = LeaseQueue(clock)
        self.client_lease_seconds = client_lease_seconds
        self.clients = ClientLeases(self._queue, client_lease_seconds)

    @property
    def num_leases(self) -> int:
        """The number of leases that can end."""
        return len(self._queue)

    def begin(self, lifetime: Lifetime, delete: Delete) -> Life:
        """Returns the life of a new resource; calls `delete` with a reason when a lease ends it."""
        leases: list[Lease[End]] = []
        owned, client, idle = Owned(delete), None, None
        if lifetime.owner:
            client = self.clients.own(lifetime.owner, owned)
            leases.append(client.lease)
        if lifetime.idle_lease is not None:
            idle = self._queue.begin(lambda: _delete_idle(lifetime, delete), lifetime.idle_lease)
            leases.append(idle)
        return Life(lifetime, tuple(leases), lambda: self._end(client, owned, idle))

    def expire(self, turn: Turn) -> int:
        """Deletes resources whose leases have ended, in one turn; returns the number."""
        count = self.clients.delete_some(turn)
        while (lease := self._queue.pop(turn)) is not None:
            count += lease.item() + self.clients.delete_some(turn)
        return count

    def _end(self, client: Client | None, owned: Owned, idle: Lease[End] | None) -> None:
        if client is not None:
            self.clients.disown(client, owned)
        if idle is not None:
            self._queue.cancel(idle)


def _delete_idle(lifetime: Lifetime, delete: Delete) -> int:
    delete(f"nobody used it for {lifetime.idle_lease:g} s, its idle_lease")
    return 1
