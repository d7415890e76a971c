"""Finds what expires, without looking at everything."""

import heapq
import itertools
from typing import Generic, Protocol, TypeVar

_LOOKS = 1 << 12
"""The most things that are looked at together."""
_FEW = 64


class Leased(Protocol):
    """A thing that expires unless it is used.

    Attributes:
        expires: The time at which it expires. It may become later at any time.
        users: How many calls use it now. Meanwhile it does not expire.
        queued: The time at which it will be looked at. Belongs to `Expiries`.
    """

    expires: float
    users: int
    queued: float | None


LeasedT = TypeVar("LeasedT", bound=Leased)


class Expiries(Generic[LeasedT]):
    """Things by the times at which they expire. Each is looked at about once for its lease."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, LeasedT]] = []
        self._tie_breaker = itertools.count()
        self._due: dict[int, LeasedT] = {}
        """Things that are to expire, but may be in use, by their Python ids."""
        self._num_queued = 0

    def add(self, leased: LeasedT) -> None:
        """Adds a thing, or one that expires earlier than before."""
        if id(leased) in self._due or (leased.queued is not None and leased.queued <= leased.expires):
            return
        self._num_queued += leased.queued is None
        self._push(leased)

    def remove(self, leased: LeasedT) -> None:
        """Removes a thing that is gone."""
        self._due.pop(id(leased), None)
        self._num_queued -= leased.queued is not None
        leased.queued = None
        if len(self._heap) > 2 * self._num_queued + _FEW:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].queued]
            heapq.heapify(self._heap)

    def expired(self, now: float) -> list[LeasedT]:
        """Returns things that have expired and that nobody uses: not all, if they are many. They stay until removed."""
        for _ in range(_LOOKS):
            if not self._heap or self._heap[0][0] > now:
                break
            at, _, leased = heapq.heappop(self._heap)
            if leased.queued != at:
                continue
            if leased.expires > now:
                self._push(leased)
            else:
                leased.queued = None
                self._num_queued -= 1
                self._due[id(leased)] = leased
        found = []
        for leased in list(self._due.values()):
            if leased.expires > now:
                del self._due[id(leased)]
                self.add(leased)
            elif not leased.users:
                found.append(leased)
        return found

    def _push(self, leased: LeasedT) -> None:
        leased.queued = leased.expires
        heapq.heappush(self._heap, (leased.expires, next(self._tie_breaker), leased))
