"""The clock of leases, items with deadlines, and time slices on the event loop."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Generic, Self, TypeVar

SLICE_ITEMS = 256
"""The small things, of some microseconds each, that are done before other tasks or threads get their turn."""
ItemT = TypeVar("ItemT")


class ServiceClock:
    """Counts the seconds in which the server could hear its clients.

    Clients of a server that is suspended, by SIGSTOP or with its virtual machine, cannot renew their leases. With an
    ordinary clock these would end as soon as the server goes on.
    """

    def __init__(self, monotonic: Callable[[], float], longest_tick: float) -> None:
        self._monotonic = monotonic
        self._longest_tick = longest_tick
        self._last_tick = monotonic()
        self._missed = 0.0

    def __call__(self) -> float:
        """Returns the time in seconds since an arbitrary moment; it never goes back."""
        now = self._monotonic()
        return min(now, self._last_tick + self._longest_tick) - self._missed

    def tick(self) -> None:
        """Counts the time since the last tick, as the server is awake."""
        now = self._monotonic()
        self._missed += max(now - self._last_tick - self._longest_tick, 0.0)
        self._last_tick = now


class Turn:
    """A time slice on the event loop, counted in items.

    Attributes:
        is_over: Whether items were left for the next turn.
    """

    __slots__ = ("_left", "is_over")

    def __init__(self, items: int | None = None) -> None:
        self._left = SLICE_ITEMS if items is None else items
        self.is_over = False

    def look(self) -> bool:
        """Returns True if one more item may be looked at; otherwise the turn is over."""
        if self._left <= 0:
            self.is_over = True
            return False
        self._left -= 1
        return True

    async def spend(self, items: int = 1) -> None:
        """Counts items that come next; if the turn is over, other tasks get theirs first."""
        if self._left <= 0:
            await asyncio.sleep(0)
            self._left = SLICE_ITEMS
        self._left -= items


class InTurns(AsyncIterator[ItemT]):
    """Iterates over any number of items on the event loop; other tasks get their turn after each `SLICE_ITEMS`."""

    def __init__(self, items: Iterable[ItemT]) -> None:
        self._items = iter(items)
        self._turn = Turn()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ItemT:
        try:
            item = next(self._items)
        except StopIteration:
            raise StopAsyncIteration from None
        await self._turn.spend()
        return item


def batched(items: Iterable[ItemT]) -> Iterator[list[ItemT]]:
    """Yields up to `SLICE_ITEMS` items at a time, for steps of a thread between which others run."""
    left = iter(items)
    while some := list(itertools.islice(left, SLICE_ITEMS)):
        yield some


class Deadlines(Generic[ItemT]):
    """Items by deadline. Finding the items that are due costs nothing for the others.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ItemT]] = []
        self._tie_breaker = itertools.count()

    def add(self, deadline: float, item: ItemT) -> None:
        """Adds an item that is due at `deadline`."""
        heapq.heappush(self._heap, (deadline, next(self._tie_breaker), item))

    def is_due(self, now: float) -> bool:
        """Returns True if the earliest deadline has come."""
        return bool(self._heap) and self._heap[0][0] <= now

    def pop(self) -> ItemT:
        """Removes and returns the item with the earliest deadline."""
        return heapq.heappop(self._heap)[2]
