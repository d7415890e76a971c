"""Leases, the queue that finds those that have ended, and the task that ends what has expired."""

import asyncio
import heapq
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

from gradserve_server.runtime.event_loop import ServiceClock, Turn

_log = logging.getLogger(__name__)
ItemT = TypeVar("ItemT")

_FEW = 64
_MOVED_AT_ONCE = 8


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
