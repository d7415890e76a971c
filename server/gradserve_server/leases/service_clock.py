"""The clock of leases."""

from collections.abc import Callable


class ServiceClock:
    """Counts the seconds in which the server could hear its clients.

    A server that was suspended, by SIGSTOP or with its virtual machine, heard nobody, and its clients could not renew
    their leases. Without this clock these would end when the server goes on.
    """

    def __init__(self, monotonic: Callable[[], float], longest_tick: float) -> None:
        """Takes a clock, and the most seconds that count from one tick to the next."""
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
