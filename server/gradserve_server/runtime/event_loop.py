"""The event loop of a server: how work shares it, its clock, and what may hold it up.

Most calls never wait. A task for each of them, and a turn of the event loop until it begins, would take longer than
their work. Python has eager tasks for this, but only from 3.12 on.
"""

import asyncio
import gc
import heapq
import itertools
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from functools import partial
from types import FrameType, coroutine
from typing import Any, Generic, Self, TypeVar

from gradserve_protocol.lasting import lasting_thread

T = TypeVar("T")


class EagerCall(Generic[T]):
    """A call that has run until its end, or until it first had to wait.

    The first part runs in the caller's task. If `rest` runs in another one, the first part must not have entered
    anything that belongs to its task, such as `asyncio.timeout`.

    Attributes:
        is_done: Whether it has ended.
    """

    __slots__ = ("_error", "_result", "_waits_for", "_work", "is_done")

    def __init__(self, work: Awaitable[T]) -> None:
        """Runs the first part."""
        self._work: Generator[Any, Any, T] = work.__await__()
        self._waits_for: Any = None
        self._result: Any = None
        self._error: Exception | None = None
        self.is_done = True
        try:
            self._waits_for = self._work.send(None)
            self.is_done = False
        except StopIteration as end:
            self._result = end.value
        except Exception as error:
            self._error = error

    def result(self) -> T:
        """Returns the result of a call that has ended, or raises its error."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame: a cycle would keep the work's memory until it is collected
        result: T = self._result
        return result

    async def rest(self) -> T:
        """Runs the rest; returns the result or raises the error. Await it once, if the call has not ended."""
        return await self._resume()

    @coroutine
    def _resume(self) -> Generator[Any, Any, T]:
        waits_for, self._waits_for = self._waits_for, None
        while True:
            try:
                answer = yield waits_for
            except GeneratorExit:
                self._work.close()
                raise
            except BaseException as error:
                resume: Any = self._work.throw
                answer = error
            else:
                resume = self._work.send
            try:
                waits_for = resume(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                del answer  # as above


class BackgroundTasks:
    """Work that continues when its caller is cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Does some work eagerly; makes a task only if it has to wait."""
        begun = EagerCall(work)
        return begun.result() if begun.is_done else await asyncio.shield(self.begin(begun.rest()))

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts some work in a task, which nobody has to await."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(retrieve)
        return task


def retrieve(done: asyncio.Future[Any]) -> None:
    """Retrieves an exception that nobody may be waiting for."""
    if not done.cancelled():
        done.exception()


SLICE_ITEMS = 256
"""The small things, of some microseconds each, that are done before other tasks or threads get their turn."""
ItemT = TypeVar("ItemT")


class ServiceClock:
    """Counts the seconds in which the server could hear its clients.

    Clients of a server that is suspended, by SIGSTOP or with its virtual machine, cannot renew their leases. With an
    ordinary clock these would end as soon as the server goes on.
    """

    def __init__(self, monotonic: Callable[[], float], longest_tick: float) -> None:
        self._monotonic = monotonic
        self._longest_tick = longest_tick
        self._last_tick = monotonic()
        self._missed = 0.0

    def __call__(self) -> float:
        """Returns the time in seconds since an arbitrary moment; it never goes back."""
        now = self._monotonic()
        return min(now, self._last_tick + self._longest_tick) - self._missed

    def tick(self) -> None:
        """Counts the time since the last tick, as the server is awake."""
        now = self._monotonic()
        self._missed += max(now - self._last_tick - self._longest_tick, 0.0)
        self._last_tick = now


class Turn:
    """A time slice on the event loop, counted in items.

    Attributes:
        is_over: Whether items were left for the next turn.
    """

    __slots__ = ("_left", "is_over")

    def __init__(self, items: int | None = None) -> None:
        self._left = SLICE_ITEMS if items is None else items
        self.is_over = False

    def look(self) -> bool:
        """Returns True if one more item may be looked at; otherwise the turn is over."""
        if self._left <= 0:
            self.is_over = True
            return False
        self._left -= 1
        return True

    def charge(self, items: int) -> None:
        """Counts an item that has taken as long as several."""
        self._left -= items - 1

    async def spend(self, items: int = 1) -> None:
        """Counts items that come next; if the turn is over, other tasks get theirs first."""
        if self._left <= 0:
            await asyncio.sleep(0)
            self._left = SLICE_ITEMS
        self._left -= items


class InTurns(AsyncIterator[ItemT]):
    """Iterates over any number of items on the event loop; other tasks get their turn after each `SLICE_ITEMS`."""

    def __init__(self, items: Iterable[ItemT]) -> None:
        self._items = iter(items)
        self._turn = Turn()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ItemT:
        try:
            item = next(self._items)
        except StopIteration:
            raise StopAsyncIteration from None
        await self._turn.spend()
        return item


def batched(items: Iterable[ItemT]) -> Iterator[list[ItemT]]:
    """Yields up to `SLICE_ITEMS` items at a time, for steps of a thread between which others run."""
    left = iter(items)
    while some := list(itertools.islice(left, SLICE_ITEMS)):
        yield some


class Deadlines(Generic[ItemT]):
    """Items by deadline. Finding the items that are due costs nothing for the others.

    Not thread-safe: used on the event loop only.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ItemT]] = []
        self._tie_breaker = itertools.count()

    def add(self, deadline: float, item: ItemT) -> None:
        """Adds an item that is due at `deadline`."""
        heapq.heappush(self._heap, (deadline, next(self._tie_breaker), item))

    def is_due(self, now: float) -> bool:
        """Returns True if the earliest deadline has come."""
        return bool(self._heap) and self._heap[0][0] <= now

    def pop(self) -> ItemT:
        """Removes and returns the item with the earliest deadline."""
        return heapq.heappop(self._heap)[2]


_log = logging.getLogger(__name__)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Returns an event loop: uvloop's where it is installed, which takes less time for a call, or asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


_OWN_PACKAGES = "gradserve"
"""The beginning of the names of all packages of the distribution."""
_RUNS_THE_LOOP = "asyncio.runners"
_WAITS = ("selectors", "asyncio.base_events", "asyncio.selector_events")
"""Modules in which asyncio's event loop is between two turns. If it is late there, others have the processor."""
_SHOWN_FUNCTIONS = 8


class LoopWatch:
    """Logs slow turns of the event loop, with the functions that were running.

    A thread asks the event loop for a sign of life at intervals. If it is late, the thread inspects the loop's stack.
    Each check costs a turn of the event loop, so the watch is off by default.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts watching the event loop that runs in this thread."""
        watched = asyncio.get_running_loop(), threading.get_ident(), time.thread_time()
        watch = partial(self._watch, *watched)
        self._thread = lasting_thread("the watch over the event loop", watch, _log, "gradserve-loop-watch")

    def stop(self) -> None:
        """Ends the watch, without waiting for its thread."""
        self._stop.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int, used: float) -> None:
        while not self._stop.wait(self._longest / 2):
            sign = _Sign()
            asked = time.monotonic()
            try:
                loop.call_soon_threadsafe(sign.give)
            except RuntimeError:
                return  # the loop is closed
            running = ""
            if not sign.given.wait(self._longest):
                frame = sys._current_frames().get(thread_id)
                running = "" if frame is None else _functions(frame)
                while not sign.given.wait(1.0):
                    if self._stop.is_set():
                        return
            if running:
                _log.warning(
                    "the event loop was busy for %.3f s (%.3f s of processor time) in %s",
                    time.monotonic() - asked,
                    sign.processor_time - used,
                    running,
                )
            used = sign.processor_time


class _Sign:
    """A sign of life of the event loop."""

    def __init__(self) -> None:
        self.given = threading.Event()
        self.processor_time = 0.0

    def give(self) -> None:
        self.processor_time = time.thread_time()
        self.given.set()


def _functions(frame: FrameType) -> str:
    """Returns the functions on the event loop's stack, outermost first; empty while it waits.

    Of functions of other packages, only the innermost.
    """
    found: list[str] = []
    at: FrameType | None = frame
    while at is not None and _module(at) != _RUNS_THE_LOOP:
        if _module(at).startswith(_OWN_PACKAGES) or (at is frame and _module(at) not in _WAITS):
            found.append(f"{_module(at)}.{at.f_code.co_qualname}:{at.f_lineno}")
        at = at.f_back
    shown = found[::-1]
    if len(shown) > _SHOWN_FUNCTIONS:
        shown = [*shown[:3], "...", *shown[-(_SHOWN_FUNCTIONS - 3) :]]
    return " > ".join(shown)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))


_CHECK_SECONDS = 10.0
_LOOK_SECONDS = 600.0
_SELDOM_SECONDS = 3600.0
_GROWTH, _FREE_GROWTH = 1.25, 50_000
"""Growth since the last look, as a factor and a number of objects on top, that makes the next look due early."""
_MANY = 500_000
"""A look at so many objects takes about half a second."""
_OBJECTS_OF_A_CALL = 120
"""A waiting call has about 100 objects."""


class GcTuner:
    """Avoids long pauses of the garbage collector for the length of a block.

    A full collection visits all objects, which takes a second on a server with a million of them, while all calls wait.
    So its survivors are frozen. If they become garbage later, a look at everything finds it: every ten minutes (every
    hour on a server with very many objects), and earlier if many more objects were frozen since the last one, as each
    call that waits during a full collection is frozen, and gRPC makes a cycle of it. Objects of calls that still wait
    are no garbage, and no reason for a look.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        num_waiting: Callable[[], int] = lambda: 0,
        is_prepared: Callable[[], bool] = lambda: True,
    ) -> None:
        """Makes a tuner of the collector.

        Args:
            clock: A monotonic clock, in seconds.
            num_waiting: Returns the number of calls that wait.
            is_prepared: Returns True once all modules and kernels that stay are loaded: a third of all objects, which
                are no reason for a look.
        """
        self._clock = clock
        self._num_waiting = num_waiting
        self._is_prepared = is_prepared
        self._is_settled = is_prepared()
        self._last_look = clock()
        self._left = 0
        """The number of frozen objects just after the last look."""
        self._waited = 0
        """The number of calls that waited then."""
        self._added = 0
        """The number of objects frozen since then, of which some may be gone: counting the rest visits all of them."""

    def __enter__(self) -> Self:
        """Freezes the objects made so far."""
        gc.freeze()
        self._left = gc.get_freeze_count()
        gc.callbacks.append(self._collected)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._collected)
        gc.unfreeze()

    async def look_at_all(self) -> None:
        """Runs full collections when they are due, until it is cancelled."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            self.look_if_due()

    def look_if_due(self) -> bool:
        """Runs a full collection if it is due; returns whether it did."""
        if not self._is_settled and self._is_prepared():
            self._is_settled = True
            gc.freeze()
            self._left, self._added = gc.get_freeze_count(), 0
        now, num_waiting = self._clock(), self._num_waiting()
        interval = _SELDOM_SECONDS if self._left + self._added > _MANY else _LOOK_SECONDS
        if now - self._last_look < interval and not self._has_grown(num_waiting):
            return False
        self._last_look, self._waited, self._added = now, num_waiting, 0
        gc.unfreeze()
        gc.collect()  # whose survivors are frozen again, by the callback
        self._left, self._added = self._added, 0
        return True

    def _has_grown(self, num_waiting: int) -> bool:
        most = self._left * _GROWTH + _FREE_GROWTH + _OBJECTS_OF_A_CALL * max(num_waiting - self._waited, 0)
        if self._left + self._added > most:
            self._added = max(gc.get_freeze_count() - self._left, 0)
        return self._left + self._added > most

    def _collected(self, phase: str, info: Mapping[str, Any]) -> None:
        if phase == "stop" and info["generation"] == 2:
            self._added += len(gc.get_objects())
            gc.freeze()
