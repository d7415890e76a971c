"""A link that many transfers share."""

import math
from collections import deque
from typing import Generic, TypeVar

WhoT = TypeVar("WhoT")

_FASTEST = 1e15
"""Bytes a second, in place of no limit at all."""


class SharedLink(Generic[WhoT]):
    """One direction of a link, whose transfers are of one size and get equal parts of it (processor sharing).

    All transfers under way have the same rate, so they end in the order in which they began.
    """

    def __init__(self, num_bytes: float, capacity: float, limit: float) -> None:
        """Takes the size of a transfer, and in bytes a second what all of them and what one of them can have."""
        self._num_bytes = num_bytes
        self._capacity = min(capacity, _FASTEST)
        self._limit = limit
        self._now = 0.0
        self._served = 0.0
        """The bytes that a transfer would have got which has been under way from the start."""
        self._ends: deque[tuple[float, WhoT]] = deque()

    def begin(self, now: float, who: WhoT) -> None:
        """Begins a transfer of somebody."""
        self._advance(now)
        self._ends.append((self._served + self._num_bytes, who))

    @property
    def next_end(self) -> float:
        """When the next transfer ends if none begins before; math.inf without any."""
        return self._now + max(self._ends[0][0] - self._served, 0.0) / self._rate if self._ends else math.inf

    def end(self, now: float) -> WhoT:
        """Ends the next transfer; returns whose it was."""
        self._advance(now)
        return self._ends.popleft()[1]

    @property
    def _rate(self) -> float:
        return min(self._limit, self._capacity / len(self._ends))

    def _advance(self, now: float) -> None:
        if self._ends:
            self._served += (now - self._now) * self._rate
        self._now = now
