"""An event loop in virtual time: no waiting, no threads, the same order every time."""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any


class StuckError(Exception):
    """Somebody waits for something that never happens."""


class _Selector(selectors.SelectSelector):
    """Lets time pass instead of waiting."""

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
        self.on_turn: Callable[[bool], object] = lambda _: None
        super().__init__(_Selector(self))

    def time(self) -> float:
        """Returns the virtual time."""
        return self.now

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
