"""Ends resources that nobody deletes: by the leases of the clients that own them, and by idle leases."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from gradserve_server.errors import InvalidArgumentError, ServiceError
from gradserve_server.limits import MAX_ID_BYTES, check_length
from gradserve_server.resources.leases import Lease, LeaseQueue, expire_all
from gradserve_server.runtime.event_loop import Turn

_LONGEST_SECONDS = 315_576_000_000.0
"""The longest time of protobuf's Duration, in which answers tell it: 10,000 years."""


@dataclass(frozen=True)
class Lifetime:
    """The leases that end a resource, apart from its deletion; none by default.

    Attributes:
        owner: The id of the client that it is private to, and with whose lease it ends. Empty: it is shared.
        idle_lease: Seconds without use after which it ends; None: never.

    Raises:
        InvalidArgumentError: The owner's id is too long, or the idle lease is not positive or too long.
    """

    owner: str = ""
    idle_lease: float | None = None

    def __post_init__(self) -> None:
        check_length(self.owner, MAX_ID_BYTES, "lifetime.owner_client_id")
        if self.idle_lease is not None and not 0 < self.idle_lease < math.inf:
            raise InvalidArgumentError(
                f"expected a positive idle_lease, got {self.idle_lease:g} s", field="lifetime.idle_lease"
            )
        if self.idle_lease is not None and self.idle_lease > _LONGEST_SECONDS:
            raise InvalidArgumentError(
                f"expected an idle_lease of at most 10,000 years, got {self.idle_lease:g} s",
                field="lifetime.idle_lease",
            )

    def differences(self, other: "Lifetime") -> list[str]:
        """Returns the differences from `other`, in words, without the ids of owners."""
        found = []
        if self.owner != other.owner:
            found.append("it is private to another client" if self.owner else "it is shared, not private")
        if self.idle_lease != other.idle_lease:
            found.append(f"idle_lease is {_text(self.idle_lease)}, not {_text(other.idle_lease)}")
        return found


SHARED = Lifetime()
"""The lifetime of a resource that only its deletion ends."""


def _text(seconds: float | None) -> str:
    return "None" if seconds is None else f"{seconds:g} s"


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
        await expire_all(self.delete_some)
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
        clock: The monotonic clock of leases, in seconds.
        client_lease_seconds: The length of the leases of clients.
        clients: The leases of clients.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, clock: Callable[[], float], client_lease_seconds: float) -> None:
        self.clock = clock
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
