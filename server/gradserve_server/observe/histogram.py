"""Histograms of durations."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Self

CALL_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Bounds for the work of calls, of which the smallest take less than a tenth of a millisecond."""
ROUND_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds for rounds and waits, which last as long as the slowest worker computes."""
STEPS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, 64.0)
"""Bounds for how many steps a gradient was late."""


class Histogram:
    """Counts of values between fixed bounds. Not thread-safe: used on the event loop only.

    Attributes:
        bounds: The upper bounds, inclusive, in increasing order; one more bucket has the values above all of them.
        counts: The number of values in each bucket.
        total: The sum of all values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Self:
        """Returns a histogram of the values so far."""
        made = type(self)(self.bounds)
        made.counts[:] = self.counts
        made.total = self.total
        return made

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)
