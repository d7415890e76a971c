"""The leases of clients that own something."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gradserve_server.errors import InvalidArgumentError, ServiceError
from gradserve_server.leases.lease import Lease, LeaseQueue
from gradserve_server.leases.lifetime import check_client_id

_DELETED_AT_ONCE = 256
"""Resources, before others get their turn."""

Delete = Callable[[str], object]
"""Deletes a resource; takes the reason, in words."""

End = Callable[[], int]
"""Is called when a lease has run out; returns how many resources it has deleted."""


@dataclass(eq=False)
class Owned:
    """A resource that a client owns."""

    delete: Delete


@dataclass(eq=False)
class Client:
    """A client that owns something.

    Attributes:
        client_id: Its id.
        lease: Renewed by every use of what it owns; what it owns ends with it.
        owned: What it owns, oldest first.
        holder: Answered when a call that holds the lease is over; whether another call has taken its place.
    """

    client_id: str
    lease: Lease[End]
    owned: dict[Owned, None] = field(default_factory=dict)
    holder: "asyncio.Future[bool] | None" = None


class ClientLeases:
    """Knows what clients own as long as their leases last.

    Costs nothing for clients that own nothing. Not thread-safe: used on the event loop only.
    """

    def __init__(self, queue: LeaseQueue[End], seconds: float) -> None:
        """Takes how long leases are, in `seconds`."""
        self._queue = queue
        self._seconds = seconds
        self._clients: dict[str, Client] = {}
        self._ending: list[tuple[Client, str]] = []
        self._closed: ServiceError | None = None

    def __len__(self) -> int:
        return len(self._clients)

    def own(self, client_id: str, owned: Owned) -> Client:
        """Makes a client the owner of a resource; returns the client."""
        client = self._clients.get(client_id)
        if client is None:
            lease = self._queue.begin(lambda: self._run_out(client_id), self._seconds)
            client = self._clients[client_id] = Client(client_id, lease)
        client.owned[owned] = None
        client.lease.renew()
        return client

    def disown(self, client: Client, owned: Owned) -> None:
        """Takes note that a resource has ended."""
        client.owned.pop(owned, None)
        if not client.owned and self._clients.get(client.client_id) is client:
            self._forget(client)

    async def hold(self, client_id: str) -> bool:
        """Keeps the lease of a client until it owns nothing.

        Returns:
            Whether a later call for the same client has taken the place of this one.

        Raises:
            InvalidArgumentError: The id is empty or too long.
            ServiceError: The server shuts down.
        """
        _check_id(client_id)
        client = self._clients.get(client_id)
        if client is None:
            return False
        if self._closed is not None:
            raise self._closed
        _answer(client.holder, replaced=True)
        holder: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        client.holder = holder
        with client.lease.use():
            return await holder

    async def end(self, client_id: str) -> int:
        """Ends the lease of a client, and deletes what it owns; returns how much that was.

        Raises:
            InvalidArgumentError: The id is empty or too long.
        """
        _check_id(client_id)
        count = self._end(client_id, "it was private to a client that was closed")
        while self._ending:
            self.delete_some(_DELETED_AT_ONCE)
            await asyncio.sleep(0)
        return count

    def delete_some(self, limit: int) -> int:
        """Deletes up to `limit` of the resources of clients whose leases have run out; returns how many."""
        count = 0
        while self._ending and count < limit:
            client, reason = self._ending[-1]
            if not client.owned:
                self._ending.pop()
                continue
            owned, _ = client.owned.popitem()
            owned.delete(reason)
            count += 1
        return count

    def close(self, error: ServiceError) -> None:
        """Ends the calls that hold leases with an error, and those to come."""
        self._closed = error
        for client in self._clients.values():
            if client.holder is not None and not client.holder.done():
                client.holder.set_exception(error)

    def _run_out(self, client_id: str) -> int:
        self._end(
            client_id,
            f"it was private to a client, whose lease of {self._seconds:g} s has ended: for so long that client had no "
            "connection to the server, and used nothing that it owned",
        )
        return 0

    def _end(self, client_id: str, reason: str) -> int:
        client = self._clients.get(client_id)
        if client is None:
            return 0
        self._forget(client)
        self._ending.append((client, reason))
        return len(client.owned)

    def _forget(self, client: Client) -> None:
        del self._clients[client.client_id]
        self._queue.cancel(client.lease)
        _answer(client.holder, replaced=False)


def _answer(holder: "asyncio.Future[bool] | None", *, replaced: bool) -> None:
    if holder is not None and not holder.done():
        holder.set_result(replaced)


def _check_id(client_id: str) -> None:
    if not client_id:
        raise InvalidArgumentError("expected the id of a client, got an empty one", field="client_id")
    check_client_id(client_id, "client_id")
