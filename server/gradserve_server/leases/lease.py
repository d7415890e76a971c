"""Leases, and what ends them in time."""

import heapq
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_FEW = 64


class Lease:
    """A time that begins anew with every use, and stands still while a use is under way.

    Made by `LeaseQueue.begin`.

    Attributes:
        seconds: How long it is.
        on_end: Is to be called by whoever ends it; returns how many resources it deletes at once.
    """

    def __init__(self, seconds: float, on_end: Callable[[], int], clock: Callable[[], float]) -> None:
        self.seconds = seconds
        self.on_end = on_end
        self._clock = clock
        self._users = 0
        self._end = clock() + seconds

    def renew(self) -> None:
        """Lets the time begin anew."""
        self._end = self._clock() + self.seconds

    @contextmanager
    def use(self) -> Iterator[None]:
        """Lets the time stand still until the end of the block, and then begin anew."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self.renew()

    def end(self, now: float) -> float:
        """Returns when it ends if it is not used from now on; while it is used, as if that ended now."""
        return now + self.seconds if self._users else self._end


class LeaseQueue:
    """Finds leases that have run out, at a cost for those alone.

    Each stands where its end was when it was queued. Renewing a lease does not move it: when that time comes, it is put
    where its end is by then. So a lease that lasts is looked at once in its length.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Takes a monotonic clock in seconds."""
        self._clock = clock
        self._heap: list[tuple[float, int, Lease]] = []
        self._live: set[Lease] = set()
        self._tie_breaker = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    def begin(self, seconds: float, on_end: Callable[[], int]) -> Lease:
        """Returns a new lease; `on_end` is for whoever pops it."""
        lease = Lease(seconds, on_end, self._clock)
        self._live.add(lease)
        self._push(lease, self._clock())
        return lease

    def cancel(self, lease: Lease) -> None:
        """Forgets a lease, if it is there: what it was for has ended in another way."""
        self._live.discard(lease)
        if len(self._heap) > 2 * len(self._live) + _FEW:
            self._heap = [entry for entry in self._heap if entry[2] in self._live]
            heapq.heapify(self._heap)

    def pop(self) -> Lease | None:
        """Removes and returns a lease that has run out, None when there is none."""
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            _, _, lease = heapq.heappop(self._heap)
            if lease not in self._live:
                continue
            if lease.end(now) <= now:
                self._live.discard(lease)
                return lease
            self._push(lease, now)
        return None

    def _push(self, lease: Lease, now: float) -> None:
        heapq.heappush(self._heap, (lease.end(now), next(self._tie_breaker), lease))
