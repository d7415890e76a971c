"""The effort that goes into one measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

_LEAST_REPEATS = 3
"""Fewer have no middle half."""


@dataclass(frozen=True)
class Effort:
    """The number of times that a measurement is repeated, and the time allowed for that.

    Attributes:
        repeats: The most repetitions.
        seconds: The time after which no further repetition begins, unless there were fewer than three.
    """

    repeats: int
    seconds: float = math.inf

    def repetitions(self) -> Iterator[int]:
        """Yields the numbers of the repetitions, from 0, while it is worth the time."""
        end = time.monotonic() + self.seconds
        for repetition in range(self.repeats):
            if repetition >= _LEAST_REPEATS and time.monotonic() > end:
                return
            yield repetition
