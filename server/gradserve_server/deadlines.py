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

    def is_due(self, now: float) -> bool:
        """Returns True if the earliest deadline has come."""
        return bool(self._heap) and self._heap[0][0] <= now

    def pop(self) -> ItemT:
        """Removes and returns the item with the earliest deadline."""
        return heapq.heappop(self._heap)[2]
