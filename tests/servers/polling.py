"""Waiting for a state that only the API of a server shows."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 60.0
"""How long tests wait for what has to happen: on a machine with other work that is late, and no test is slower for it
unless it fails."""

_INTERVAL_SECONDS = 0.01


def eventually(look: Callable[[], T], accept: Callable[[T], bool] = bool, *, within: float = PATIENCE_SECONDS) -> T:
    """Looks again and again until what it sees is acceptable; returns that, or fails with what it saw last."""
    end = time.monotonic() + within
    while True:
        seen = look()
        if accept(seen):
            return seen
        if time.monotonic() > end:
            raise AssertionError(f"not so within {within:g} s; the last look saw {seen!r}")
        time.sleep(_INTERVAL_SECONDS)


async def eventually_async(
    look: Callable[[], Awaitable[T]], accept: Callable[[T], bool] = bool, *, within: float = PATIENCE_SECONDS
) -> T:
    """Does the same on an event loop."""
    end = time.monotonic() + within
    while True:
        seen = await look()
        if accept(seen):
            return seen
        if time.monotonic() > end:
            raise AssertionError(f"not so within {within:g} s; the last look saw {seen!r}")
        await asyncio.sleep(_INTERVAL_SECONDS)
