"""The leases of clients that own resources."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gradserve_server.errors import InvalidArgumentError, ServiceError
from gradserve_server.leases.lease import Lease, LeaseQueue
from gradserve_server.leases.turn import Turn
from gradserve_server.limits import MAX_ID_BYTES, check_length

_DELETED_AT_ONCE = 256
"""Resources deleted before other work gets its turn."""

Delete = Callable[[str], object]
"""A function that deletes a resource; takes the reason, in words."""

End = Callable[[], int]
"""A function that is called when a lease has ended; returns the number of resources it has deleted."""


@dataclass(eq=False)
class Owned:
    """A resource that a client owns."""

    delete: Delete


@dataclass(eq=False)
class Client:
    """A client that owns resources.

    Attributes:
        client_id: Its id.
        lease: The lease, renewed by every use of its resources, which end with it.
        owned: Its resources, oldest first.
        holder: A future for the call that holds the lease, resolved when this is over: True if another call replaced
            it.
    """

    client_id: str
    lease: Lease[End]
    owned: dict[Owned, None] = field(default_factory=dict)
    holder: "asyncio.Future[bool] | None" = None


class ClientLeases:
    """The resources that clients own, and the leases that keep them.

    Costs nothing for clients that own nothing. Not thread-safe: used on the event loop only.
    """

    def __init__(self, queue: LeaseQueue[End], seconds: float) -> None:
        """Takes the length of leases in `seconds`."""
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
        """Forgets a resource that has ended."""
        client.owned.pop(owned, None)
        if not client.owned and self._clients.get(client.client_id) is client:
            self._forget(client)

    async def hold(self, client_id: str) -> bool:
        """Keeps the lease of a client until the client owns nothing.

        Returns:
            Whether a later call for the same client has replaced this one.

        Raises:
            InvalidArgumentError: The id is empty or too long.
            ServiceError: The server is shutting down.
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
        """Ends the lease of a client, and deletes its resources; returns their number.

        Raises:
            InvalidArgumentError: The id is empty or too long.
        """
        _check_id(client_id)
        count = self._end(client_id, "it was private to a client that was closed")
        while self._ending:
            self.delete_some(Turn(_DELETED_AT_ONCE))
            await asyncio.sleep(0)
        return count

    def delete_some(self, turn: Turn) -> int:
        """Deletes resources of clients whose leases have ended, in one turn; returns the number."""
        count = 0
        while self._ending and turn.look():
            client, reason = self._ending[-1]
            if not client.owned:
                self._ending.pop()
                continue
            owned, _ = client.owned.popitem()
            owned.delete(reason)
            count += 1
        return count

    def close(self, error: ServiceError) -> None:
        """Ends the calls that hold leases with an error, now and in the future."""
        self._closed = error
        for client in self._clients.values():
            if client.holder is not None and not client.holder.done():
                client.holder.set_exception(error)

    def _run_out(self, client_id: str) -> int:
        self._end(
            client_id,
            f"it was private to a client, whose lease of {self._seconds:g} s has ended: for so long the client had no "
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
    check_length(client_id, MAX_ID_BYTES, "client_id")
