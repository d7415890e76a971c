"""Bounds the processor time of a thread that serves strangers beside a thread that works."""

import selectors
import threading
import time
from collections.abc import Callable

SHARE = 0.1
"""The part of its time in which the thread may compute."""
BURST_SECONDS = 1.0
"""How long it may compute at once, if it has rested before."""


class Budget:
    """The processor time of one thread.

    Threads of one process take turns in Python, so whoever keeps this one busy would slow down all others.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
        share: float = SHARE,
        burst: float = BURST_SECONDS,
    ) -> None:
        """Takes the time, the processor time of the thread, its share, and the most seconds at once."""
        self._clock = clock
        self._used = used
        self._share = share
        self._burst = burst
        self._left = burst
        self._at, self._used_before = clock(), used()

    def debt(self) -> float:
        """Returns how many seconds the thread has to rest before it goes on: 0 if it may go on."""
        now, used = self._clock(), self._used()
        self._left += (now - self._at) * self._share - (used - self._used_before)
        self._left = min(self._left, self._burst)
        self._at, self._used_before = now, used
        return max(-self._left / self._share, 0.0)


class RestingSelector(selectors.DefaultSelector):
    """The selector of an event loop whose thread rests between two turns when its budget is used up."""

    def __init__(self, hurry: threading.Event) -> None:
        """Takes an event; once it is set, the thread rests no more. Made in the thread of the event loop."""
        super().__init__()
        self._budget = Budget()
        self._hurry = hurry

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Rests if need be, and waits for events."""
        debt = self._budget.debt()
        if debt:
            self._hurry.wait(debt)
        return super().select(timeout)
