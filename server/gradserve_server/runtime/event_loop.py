"""The event loop of a server, and what may hold it up: slow callbacks and the garbage collector."""

import asyncio
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any, Self

from gradserve_protocol.lasting import lasting_thread

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

    def __init__(self, clock: Callable[[], float] = time.monotonic, num_waiting: Callable[[], int] = lambda: 0) -> None:
        """`num_waiting` returns the number of calls that wait."""
        self._clock = clock
        self._num_waiting = num_waiting
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
