"""Threads for arithmetic, away from the event loop, and the cancellation of work in them."""

import asyncio
import contextlib
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import ParamSpec, Protocol, TypeVar

from gradserve_server.errors import AbortedError, ServiceError, UnavailableError
from gradserve_server.runtime.event_loop import SLICE_ITEMS

P = ParamSpec("P")
T = TypeVar("T")


class Cancellation:
    """Tells the threads of one piece of work to end. Safe to use from several threads.

    Work checks it at each `checkpoint`: between two kernels, two steps, two tiles of a large product. So it ends soon
    after it was cancelled, and nothing has to be interrupted. Its results are lost.
    """

    def __init__(self) -> None:
        self._reason: ServiceError | None = None

    def cancel(self, reason: ServiceError) -> None:
        """Makes each checkpoint of the work raise `reason` from now on."""
        self._reason = reason

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function as a part of the work, in any thread; returns what it returns.

        Raises:
            ServiceError: The work was cancelled.
        """
        before = _current.set(self)
        try:
            checkpoint()
            return function(*args, **kwargs)
        finally:
            _current.reset(before)

    def check(self) -> None:
        """Raises the reason if the work was cancelled."""
        if self._reason is not None:
            # A copy: an error that is kept keeps its traceback, and so the arrays of the work that it ended.
            raise copy.copy(self._reason)


_current: ContextVar[Cancellation | None] = ContextVar("cancellation", default=None)


def checkpoint() -> None:
    """Ends the work that this thread does if it was cancelled.

    Raises:
        ServiceError: The reason for the cancellation.
    """
    cancellation = _current.get()
    if cancellation is not None:
        cancellation.check()


def current() -> Cancellation:
    """Returns the cancellation of this thread's work, for the parts of the work in other threads."""
    return _current.get() or Cancellation()


DEVICE_THREADS = 4
"""The threads that use a GPU. The work of the host for an op takes some tens of microseconds, and then the thread
waits: while three wait, the fourth prepares more. Each has a stream and what CuPy, cuBLAS and cuDNN keep for a thread
or a stream: more of them would take more memory, and not make the GPU faster, which is full with the work of a few."""

PIECE_BYTES = 1 << 12
"""The bytes of element-wise work that take as long as Python's overhead for one of many small things."""
FEW_PIECES = SLICE_ITEMS
"""The most small things that are done at once; more take a thread."""
INLINE_BYTES = FEW_PIECES * PIECE_BYTES
"""Element-wise work on less than this takes a tenth of a millisecond, less than waking up a thread."""


class Compute(Protocol):
    """Runs functions, and raises what they raise."""

    async def run(self, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs element-wise work on `num_bytes` of data."""
        ...

    async def run_in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs work that takes time. If the caller is cancelled, it still waits for the work to end."""
        ...

    async def run_cancellable(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs work that takes time. If the caller is cancelled, the work ends at its next checkpoint.

        Raises:
            UnavailableError: The server stops, and has ended the work.
        """
        ...


class ThreadCompute:
    """Runs large work on a pool of threads, small work at once.

    NumPy releases the GIL in its loops, so the event loop goes on.
    """

    def __init__(self, num_threads: int, name: str = "compute") -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"gradserve-{name}")
        self._cancellable: set[Cancellation] = set()

    async def run(self, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs element-wise work on `num_bytes` of data: small work at once."""
        if num_bytes <= INLINE_BYTES:
            return function(*args, **kwargs)
        return await self.run_in_thread(function, *args, **kwargs)

    async def run_in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs work that takes time. If the caller is cancelled, it still waits for the work to end.

        So nobody frees memory that the thread still reads or writes.
        """
        return await self._run(lambda: function(*args, **kwargs), None)

    async def run_cancellable(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs work that takes time. If the caller is cancelled, the work ends at its next checkpoint.

        Raises:
            UnavailableError: The server stops, and has ended the work.
        """
        cancellation = Cancellation()
        self._cancellable.add(cancellation)
        try:
            return await self._run(lambda: cancellation.run(function, *args, **kwargs), cancellation)
        finally:
            self._cancellable.remove(cancellation)

    async def _run(self, function: Callable[[], T], cancellation: Cancellation | None) -> T:
        work = self._threads.submit(function)
        result = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            if not work.cancel():
                if cancellation is not None:
                    cancellation.cancel(AbortedError("the caller has gone"))
                while not result.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([result])
                result.exception()  # retrieved here, because nothing else will
            raise
        finally:
            # An error of the work has this frame in its traceback: it must not be found from here, or the memory of
            # the work would wait for the garbage collector.
            del work, result

    def close(self) -> None:
        """Ends work that can be cancelled, waits for running work, and ends the threads."""
        for cancellation in self._cancellable:
            cancellation.cancel(UnavailableError("the server is shutting down", code="GS_SHUTTING_DOWN"))
        self._threads.shutdown()


class InThreads:
    """Runs everything on the threads of another `Compute`, however small: on a GPU, work may wait for other work."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute

    async def run(self, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs work of any size in a thread."""
        return await self._compute.run_in_thread(function, *args, **kwargs)

    async def run_in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs work in a thread; see `Compute`."""
        return await self._compute.run_in_thread(function, *args, **kwargs)

    async def run_cancellable(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs work in a thread; see `Compute`."""
        return await self._compute.run_cancellable(function, *args, **kwargs)


class InlineCompute:
    """Runs everything at once: for tests and simulations that need a fixed order."""

    async def run(self, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns what `function` returns and raises what it raises."""
        return function(*args, **kwargs)

    async def run_in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns what `function` returns and raises what it raises."""
        return function(*args, **kwargs)

    async def run_cancellable(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns what `function` returns and raises what it raises."""
        return function(*args, **kwargs)
