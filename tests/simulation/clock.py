"""An event loop in virtual time: no waiting, no threads, the same order every time."""

import asyncio
import selectors
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LONGEST_TICK = 1.5
"""The most seconds that a service clock counts while the server is suspended."""
_ROUNDING = 1e-6
"""Seconds by which times that are computed in different ways may differ."""
_SLACK = 1.5
"""Seconds after which what has expired must be gone: the time between two looks, and the disk's."""


class StuckError(Exception):
    """Somebody waits for something that never happens."""


@dataclass(frozen=True)
class Moment:
    """A moment of virtual time.

    Attributes:
        now: The time.
        suspended: The seconds for which the server was suspended before.
        suspensions: How often it was.
    """

    now: float
    suspended: float
    suspensions: int

    def can_have_ended(self, seconds: float, since: "Moment") -> bool:
        """Returns True if a lease may have ended that was last used at an earlier moment."""
        most_counted = self._awake_since(since) + LONGEST_TICK * (self.suspensions - since.suspensions)
        return most_counted + _ROUNDING >= seconds

    def must_have_ended(self, seconds: float, since: "Moment") -> bool:
        """Returns True if nothing may be left of a lease that was last used at an earlier moment."""
        return self._awake_since(since) > seconds + _SLACK

    def _awake_since(self, earlier: "Moment") -> float:
        return (self.now - self.suspended) - (earlier.now - earlier.suspended)


class _Selector(selectors.DefaultSelector):
    """Lets time pass instead of waiting. select.select takes no descriptors above 1023."""

    def __init__(self, clock: "VirtualLoop") -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        """Ends a turn of the loop."""
        if timeout is None:
            raise StuckError
        self._clock.on_turn(timeout > 0)
        self._clock.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves when nothing else is left to do.

    Attributes:
        now: The time.
        on_turn: Called at the end of each turn, with whether nothing is left to do at this time.
    """

    def __init__(self, now: float) -> None:
        self.now = now
        self._suspended = 0.0
        self._suspensions = 0
        self.on_turn: Callable[[bool], object] = lambda _: None
        super().__init__(_Selector(self))

    def time(self) -> float:
        """Returns the virtual time."""
        return self.now

    @property
    def moment(self) -> Moment:
        """What time it is."""
        return Moment(self.now, self._suspended, self._suspensions)

    def suspend(self, seconds: float) -> None:
        """Lets time pass without anything happening, as if the machine were suspended."""
        self.now += seconds
        self._suspended += seconds
        self._suspensions += 1

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.Handle:
        """Calls back in this thread, as there is no other."""
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """Runs the function a little later, in this thread."""
        future = self.create_future()

        def run() -> None:
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(0.005, run)
        return future
