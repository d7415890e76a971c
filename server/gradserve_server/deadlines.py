"""Items with deadlines."""

import heapq
import itertools
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


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

    def pop_due(self, now: float) -> list[ItemT]:
        """Removes and returns the items that are due, earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[2])
        return due
