"""Python's garbage collector in a server process, without long pauses."""

import asyncio
import gc
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

_CHECK_SECONDS = 10.0
_LOOK_SECONDS = 600.0
_SELDOM_SECONDS = 3600.0
_GROWTH, _FREE_GROWTH = 1.25, 50_000
"""Growth since the last look, as a factor and a number of objects on top, that makes the next look due early."""
_MANY = 500_000
"""A look at so many objects takes about 0.1 s."""


class ShortPauses:
    """Makes the garbage collector look at each object that stays only a few times, for the length of a block.

    A full collection looks at all objects, which takes 0.4 s on a server with a million of them, while all calls wait.
    So what has survived one is put aside. Garbage that it turns into later is found by a look at everything, every ten
    minutes (on a server with very many objects, every hour), and earlier if much more has been put aside since the
    last one: each call that waits during a full collection is put aside, and gRPC makes a cycle of it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes the clock."""
        self._clock = clock
        self._last_look = clock()
        self._left = 0
        """The number of objects that were put aside just after the last look."""

    def __enter__(self) -> Self:
        """Puts aside the objects made so far."""
        gc.freeze()
        self._left = gc.get_freeze_count()
        gc.callbacks.append(self._collected)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends it."""
        gc.callbacks.remove(self._collected)
        gc.unfreeze()

    async def look_at_all(self) -> None:
        """Looks at everything whenever that is due, until it is cancelled."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            self.look_if_due()

    def look_if_due(self) -> bool:
        """Looks at everything if that is due; returns True if it did."""
        now, put_aside = self._clock(), gc.get_freeze_count()
        interval = _SELDOM_SECONDS if put_aside > _MANY else _LOOK_SECONDS
        has_grown = put_aside > self._left * _GROWTH + _FREE_GROWTH
        if now - self._last_look < interval and not has_grown:
            return False
        self._last_look = now
        gc.unfreeze()
        gc.collect()  # which puts aside what it finds in use
        self._left = gc.get_freeze_count()
        return True

    def _collected(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase == "stop" and info["generation"] == 2:
            gc.freeze()
