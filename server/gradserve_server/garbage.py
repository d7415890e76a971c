"""Python's garbage collector in a server process, without long pauses."""

import asyncio
import gc
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

_LOOK_SECONDS = 600.0
_SELDOM_SECONDS = 3600.0
_MANY = 500_000
"""A look at so many objects takes about 0.1 s."""


class ShortPauses:
    """Makes the garbage collector look at each object that stays only a few times, for the length of a block.

    A full collection looks at all objects, which takes 0.4 s on a server with a million of them, while all calls wait.
    So what has survived one is put aside. Garbage that it turns into later is found by a look at everything, every ten
    minutes; on a server with very many objects, every hour. Most garbage is in no cycle, and not affected.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes the clock."""
        self._clock = clock
        self._last_look = clock()

    def __enter__(self) -> Self:
        """Puts aside the objects made so far."""
        gc.freeze()
        gc.callbacks.append(self._collected)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends it."""
        gc.callbacks.remove(self._collected)
        gc.unfreeze()

    async def look_at_all(self) -> None:
        """Looks at everything once in a while, until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.look_if_due()

    def look_if_due(self) -> bool:
        """Looks at everything, unless it would take long and has been done within the hour; returns True if it did."""
        now = self._clock()
        if gc.get_freeze_count() > _MANY and now - self._last_look < _SELDOM_SECONDS:
            return False
        self._last_look = now
        gc.unfreeze()
        gc.collect()
        return True

    def _collected(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase == "stop" and info["generation"] == 2:
            gc.freeze()
