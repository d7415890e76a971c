"""Measures work by the number of calls that Python makes, which is the same on any machine."""

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Counter:
    """Counts the calls of this thread, of Python's functions and of others."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _frame: object, event: str, _argument: object) -> None:
        self.calls += event in ("call", "c_call")


@contextmanager
def counted() -> Iterator[Counter]:
    """Counts the calls of a block."""
    counter = Counter()
    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # finalizers of earlier tests are no work of this one
    sys.setprofile(counter)
    try:
        yield counter
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()


def calls_of(function: Callable[[], object]) -> int:
    """Returns the number of calls that a function makes."""
    with counted() as counter:
        function()
    return counter.calls


async def longest_turn(work: Awaitable[T]) -> tuple[T, int]:
    """Awaits some work; returns its result, and the most calls that the event loop made without a turn for others.

    What other threads do meanwhile does not count.
    """
    longest = 0
    with counted() as counter:
        task: asyncio.Future[T] = asyncio.ensure_future(work)
        while not task.done():
            before = counter.calls
            await asyncio.sleep(0)
            longest = max(longest, counter.calls - before)
    return task.result(), longest
