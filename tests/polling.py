"""Waiting for a state that only the API of a server shows."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_INTERVAL_SECONDS = 0.01


def eventually(look: Callable[[], T], accept: Callable[[T], bool] = bool, *, within: float = 30.0) -> T:
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
    look: Callable[[], Awaitable[T]], accept: Callable[[T], bool] = bool, *, within: float = 30.0
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
