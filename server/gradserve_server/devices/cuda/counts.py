"""Counts what threads do with a GPU."""

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """What one thread has done, which alone writes to it."""

    num_compiled: int = 0
    num_launches: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    wait_seconds: float = 0.0


class ThreadCounts:
    """The counts of all threads. They need no lock, as each thread has its own; those of ended threads stay."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: list[Counts] = []

    def new(self) -> Counts:
        """Returns counts for another thread."""
        with self._lock:
            self._counts.append(Counts())
            return self._counts[-1]

    def total(self) -> Counts:
        """Returns the sums of all threads."""
        with self._lock:
            counts = list(self._counts)

        def sum_of(pick: Callable[[Counts], float]) -> float:
            return sum(map(pick, counts))

        return Counts(
            int(sum_of(lambda each: each.num_compiled)),
            int(sum_of(lambda each: each.num_launches)),
            int(sum_of(lambda each: each.bytes_to_device)),
            int(sum_of(lambda each: each.bytes_to_host)),
            sum_of(lambda each: each.wait_seconds),
        )
