"""The time that one call may take."""

import math
import time
from collections.abc import Callable

from gradserve.errors import DeadlineExceededError
from gradserve.transport.settings import ConnectionSettings


class TimeLimit:
    """The time limit of one call."""

    def __init__(
        self, seconds: float | None, settings: ConnectionSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Takes the number of seconds from now on, None for no limit, and the settings of the connection."""
        self._seconds = math.inf if seconds is None else seconds
        self._clock = clock
        self._end = clock() + self._seconds
        self._settings = settings
        self._interval = settings.keepalive.interval

    def left(self) -> float:
        """Returns how many seconds are left, math.inf for no limit.

        Raises:
            DeadlineExceededError: None are.
        """
        left = self._end - self._clock()
        if left <= 0:
            raise DeadlineExceededError(f"Deadline Exceeded: there was no answer within {self._seconds:.3g} s")
        return left

    def timeout(self) -> float | None:
        """Returns how many seconds are left, None for no limit, also when none are."""
        return None if self._end == math.inf else max(self._end - self._clock(), 0.0)

    def patience(self) -> float:
        """Returns how many seconds to wait for the next bytes before the server is asked for a sign of life.

        Raises:
            DeadlineExceededError: The time is over.
        """
        if self._end - self._clock() >= self._interval:
            return self._interval
        return self.left()

    def extend_for(self, num_bytes: int) -> None:
        """Adds the time that a payload takes on a slow network."""
        self._end = max(self._end, self._clock()) + self._settings.times.transfer(num_bytes)
