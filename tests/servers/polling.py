"""Waiting for a state that only the API of a server shows."""

import asyncio
import selectors
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 120.0
"""How long tests wait for what has to happen: on a machine with other work that is late, and no test is slower for it
unless it fails."""

_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.05


def readable(*sockets: socket.socket, seconds: float | None = None) -> set[object]:
    """Waits for sockets that can be read; returns them. select.select takes no descriptors above 1023."""
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            selector.register(each, selectors.EVENT_READ)
        return {key.fileobj for key, _ in selector.select(seconds)}


def eventually(look: Callable[[], T], accept: Callable[[T], bool] = bool) -> T:
    """Looks again and again until what it sees is acceptable; returns that, or fails with what it saw last."""
    end, pause = time.monotonic() + PATIENCE_SECONDS, _FIRST_PAUSE_SECONDS
    while True:
        seen = look()
        if accept(seen):
            return seen
        if time.monotonic() > end:
            raise AssertionError(f"not so within {PATIENCE_SECONDS:g} s; the last look saw {seen!r}")
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)


async def eventually_async(look: Callable[[], Awaitable[T]], accept: Callable[[T], bool] = bool) -> T:
    """Does the same on an event loop."""
    end, pause = time.monotonic() + PATIENCE_SECONDS, _FIRST_PAUSE_SECONDS
    while True:
        seen = await look()
        if accept(seen):
            return seen
        if time.monotonic() > end:
            raise AssertionError(f"not so within {PATIENCE_SECONDS:g} s; the last look saw {seen!r}")
        await asyncio.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)


def growing_limits(first: float = 0.1) -> Iterator[float]:
    """Yields longer and longer time limits, for calls that shall run into theirs only after something has happened.

    A busy machine takes long for that, so a test tries again with more time until it has happened.
    """
    limit = first
    while limit < PATIENCE_SECONDS:
        yield limit
        limit *= 3
    raise AssertionError(f"it has not happened within {limit / 3:g} s")
