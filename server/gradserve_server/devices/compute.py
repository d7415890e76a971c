"""Runs arithmetic away from the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

INLINE_BYTES = 1 << 20
"""Element-wise work on less than this takes a tenth of a millisecond: less than a thread takes to wake up."""


class Compute(Protocol):
    """Something that runs a function on `num_bytes` of data."""

    async def run(self, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns what `function` returns and raises what it raises."""
        ...


class ThreadCompute:
    """Runs big work on a pool of threads, small work at once.

    NumPy releases the GIL in its loops, so the event loop goes on meanwhile.
    """

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="gradserve-compute")

    async def run(self, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns what `function` returns and raises what it raises."""
        if num_bytes <= INLINE_BYTES:
            return function(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Waits for what is running and ends the threads."""
        self._threads.shutdown()


class InlineCompute:
    """Runs everything at once: for tests and simulations, where order must be certain."""

    async def run(self, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns what `function` returns and raises what it raises."""
        return function(*args, **kwargs)
