"""Leases, and the lifetimes that they end: of resources that clients own, and of idle ones that nobody deletes."""

import asyncio
import heapq
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from gradserve_server.errors import InvalidArgumentError, ResourceExhaustedError, ServiceError
from gradserve_server.limits import MAX_ID_BYTES, check_length
from gradserve_server.runtime.event_loop import ServiceClock, Turn

_log = logging.getLogger(__name__)
ItemT = TypeVar("ItemT")

_FEW = 64
_MOVED_AT_ONCE = 8
_ITEMS_PER_DELETION = 8
"""The items of a turn that the deletion of a resource counts for."""
_MOST_WORKERS = 10_000
"""The most workers with leases, of about 1 KB each. Other leases are bounded by what their clients own."""


class Lease(Generic[ItemT]):
    """A time that starts again with every use, and stands still during a use.

    Made by `LeaseQueue.begin`.

    Attributes:
        item: The item that the lease is for.
        seconds: Its length.
        is_queued: Whether it has neither ended nor been cancelled.
    """

    __slots__ = ("_clock", "_end", "_users", "is_queued", "item", "seconds")

    def __init__(self, item: ItemT, seconds: float, clock: Callable[[], float]) -> None:
        self.item = item
        self.seconds = seconds
        self.is_queued = True
        self._clock = clock
        self._users = 0
        self._end = clock() + seconds

    def renew(self) -> None:
        """Starts the time again."""
        self._end = self._clock() + self.seconds

    @contextmanager
    def use(self) -> Iterator[None]:
        """Stops the time until the end of the block, and then starts it again."""
        self.begin_use()
        try:
            yield
        finally:
            self.end_use()

    def begin_use(self) -> None:
        """Stops the time until as many uses have ended as have begun."""
        self._users += 1

    def end_use(self) -> None:
        """Starts the time again, unless there are other uses."""
        self._users -= 1
        self.renew()

    def end(self, now: float) -> float:
        """Returns the time at which the lease ends if it is not used from now on; a use under way counts as ended."""
        return now + self.seconds if self._users else self._end


class LeaseQueue(Generic[ItemT]):
    """Finds leases that have ended, without looking at the others.

    The queue is sorted by the ends that leases had when they were queued. Renewing a lease does not move it: when that
    time comes, it is queued again with its current end. So a lease is looked at about once per its length.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Lease[ItemT]]] = []
        # A heap of which most leases were cancelled. What is left of it moves to the other, a few leases at a time.
        self._old: list[tuple[float, int, Lease[ItemT]]] = []
        self._num_queued = 0
        self._tie_breaker = itertools.count()

    def __len__(self) -> int:
        return self._num_queued

    def begin(self, item: ItemT, seconds: float) -> Lease[ItemT]:
        """Returns a new lease of this length."""
        lease = Lease(item, seconds, self._clock)
        self._num_queued += 1
        self._push(lease, self._clock())
        return lease

    def cancel(self, lease: Lease[ItemT]) -> None:
        """Removes a lease, if it is there, because its item has ended in another way."""
        self._remove(lease)
        if not self._old and len(self._heap) > 2 * self._num_queued + _FEW:
            self._old, self._heap = self._heap, []
        for _ in range(min(_MOVED_AT_ONCE, len(self._old))):
            entry = self._old.pop()  # a leaf: the rest is still a heap
            if entry[2].is_queued:
                heapq.heappush(self._heap, entry)

    def pop(self, turn: Turn) -> Lease[ItemT] | None:
        """Removes and returns a lease that has ended, None if there is none or the turn is over."""
        now = self._clock()
        while (heap := self._first()) and heap[0][0] <= now and turn.look():
            _, _, lease = heapq.heappop(heap)
            if not lease.is_queued:
                continue
            if lease.end(now) <= now:
                self._remove(lease)
                return lease
            self._push(lease, now)
        return None

    def _first(self) -> list[tuple[float, int, Lease[ItemT]]]:
        """Returns the heap with the earliest end."""
        if self._old and (not self._heap or self._old[0] < self._heap[0]):
            return self._old
        return self._heap

    def _remove(self, lease: Lease[ItemT]) -> None:
        if lease.is_queued:
            lease.is_queued = False
            self._num_queued -= 1

    def _push(self, lease: Lease[ItemT], now: float) -> None:
        heapq.heappush(self._heap, (lease.end(now), next(self._tie_breaker), lease))


_INTERVAL_SECONDS = 1.0


class Expiry:
    """Ends what has expired, a few things at a time, and lets the clock of leases know that the server is awake."""

    def __init__(
        self,
        clock: ServiceClock,
        in_turns: Mapping[str, Callable[[Turn], int]],
        as_a_whole: Mapping[str, Callable[[], Awaitable[int]]],
        interval: float = _INTERVAL_SECONDS,
    ) -> None:
        """Takes the clock, and what expires.

        Args:
            clock: The clock of leases.
            in_turns: What ends things in one turn and returns their number, by the name of the things.
            as_a_whole: What ends all that has expired, and gives others their turn itself.
            interval: Seconds from one time to the next.
        """
        self._clock = clock
        self._in_turns = in_turns
        self._as_a_whole = as_a_whole
        self._interval = interval

    async def run(self) -> None:
        """Goes on until it is cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            self._clock.tick()
            await self._expire()

    async def _expire(self) -> None:
        """Ends all that has expired.

        Raises:
            ExceptionGroup: Some of it could not be ended; everything else is.
        """
        everything = {what: partial(expire_all, expire) for what, expire in self._in_turns.items()}
        failures = []
        for what, expire in (everything | dict(self._as_a_whole)).items():
            try:
                _report(what, await expire())
            except Exception as error:
                failures.append(error)
        if failures:
            raise ExceptionGroup("not everything that has expired could be ended", failures)


def _report(what: str, count: int) -> None:
    if count:
        _log.info("%d %s expired", count, what)


async def expire_all(expire: Callable[[Turn], int]) -> int:
    """Deletes everything that has expired, a few at a time; returns how much it was."""
    ended = 0
    while True:
        turn = Turn()
        ended += expire(turn)
        if not turn.is_over:
            return ended
        await asyncio.sleep(0)


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
    """A client that owns resources, or holds its lease as a worker.

    Attributes:
        client_id: Its id.
        lease: The lease, renewed by every use of its resources, which end with it.
        owned: Its resources, oldest first.
        worker: The id in the ids of its calls, if it is that of a worker and keeps its lease though it may own nothing.
        holder: A future for the call that holds the lease, resolved when this is over: True if another call replaced
            it.
    """

    client_id: str
    lease: Lease[End]
    owned: dict[Owned, None] = field(default_factory=dict)
    worker: str = ""
    holder: "asyncio.Future[bool] | None" = None


class ClientLeases:
    """The leases of clients, and the resources that clients own, which their leases keep.

    A client has a lease while it owns anything. A worker has one from the call that holds it until it runs out, though
    the worker may own nothing. Not thread-safe: used on the event loop only.
    """

    def __init__(self, queue: LeaseQueue[End], seconds: float) -> None:
        self._queue = queue
        self._seconds = seconds
        self._clients: dict[str, Client] = {}
        self._workers: dict[str, Client] = {}
        self._ending: list[tuple[Client, str]] = []
        self._closed: ServiceError | None = None

    def __len__(self) -> int:
        return len(self._clients)

    def own(self, client_id: str, owned: Owned) -> Client:
        """Makes a client the owner of a resource; returns the client."""
        client = self._leased(client_id)
        client.owned[owned] = None
        client.lease.renew()
        return client

    def disown(self, client: Client, owned: Owned) -> None:
        """Forgets a resource that has ended."""
        client.owned.pop(owned, None)
        if not client.owned and not client.worker and self._clients.get(client.client_id) is client:
            self._forget(client)

    def has_worker(self, worker: str) -> bool:
        """Returns True if a worker has a lease, by the id in the ids of its calls."""
        return worker in self._workers

    async def hold(self, client_id: str, worker: str = "") -> bool:
        """Keeps the lease of a client until the client owns nothing; that of a worker until it is ended.

        Args:
            client_id: The id of the client.
            worker: The id in the ids of its calls, if it is that of a worker.

        Returns:
            Whether a later call for the same client has replaced this one.

        Raises:
            InvalidArgumentError: The id is empty, or one is too long.
            ResourceExhaustedError: Too many workers have leases already.
            ServiceError: The server is shutting down.
        """
        _check_id(client_id)
        check_length(worker, MAX_ID_BYTES, "worker_client_id")
        client = self._clients.get(client_id)
        if client is None and not worker:
            return False
        if self._closed is not None:
            raise self._closed
        if client is None or (worker and not client.worker):
            client = self._begin_worker(client_id, worker)
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
            turn.charge(_ITEMS_PER_DELETION)
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

    def _leased(self, client_id: str) -> Client:
        """Returns a client, whose lease begins now if it has none."""
        client = self._clients.get(client_id)
        if client is None:
            lease = self._queue.begin(lambda: self._run_out(client_id), self._seconds)
            client = self._clients[client_id] = Client(client_id, lease)
        return client

    def _begin_worker(self, client_id: str, worker: str) -> Client:
        if worker in self._workers:
            raise InvalidArgumentError("expected an id that no other client has", field="worker_client_id")
        if len(self._workers) >= _MOST_WORKERS:
            raise ResourceExhaustedError(
                f"too many workers hold leases: {_MOST_WORKERS} allowed", field="worker_client_id", code="GS_TOO_MANY"
            )
        client = self._leased(client_id)
        client.worker = worker
        self._workers[worker] = client
        return client

    def _forget(self, client: Client) -> None:
        self._workers.pop(client.worker, None)
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
            if num_deleted := lease.item():
                turn.charge(_ITEMS_PER_DELETION)
            count += num_deleted + self.clients.delete_some(turn)
        return count

    def _end(self, client: Client | None, owned: Owned, idle: Lease[End] | None) -> None:
        if client is not None:
            self.clients.disown(client, owned)
        if idle is not None:
            self._queue.cancel(idle)


def _delete_idle(lifetime: Lifetime, delete: Delete) -> int:
    delete(f"nobody used it for {lifetime.idle_lease:g} s, its idle_lease")
    return 1
