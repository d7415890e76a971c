"""The event loop of a server, and what may hold it up: slow callbacks and the garbage collector."""

import asyncio
import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType, TracebackType
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


_OWN_PACKAGE = __name__.partition(".")[0]
_RUNS_THE_LOOP = "asyncio.runners"
_WAITS = ("selectors", "asyncio.base_events", "asyncio.selector_events")
"""Modules in which asyncio's event loop is between two turns. If it is late there, others have the processor."""
_SHOWN_FUNCTIONS = 8


class LoopWatch:
    """Logs when a turn of the event loop takes longer than it may, and the functions that were running.

    A thread asks the event loop for a sign of life again and again. If it does not come in time, the thread looks at
    what the event loop is doing. Costs a turn of the event loop for each look, so it is off by default.
    """

    def __init__(self, longest: float) -> None:
        """Takes the most seconds for a turn."""
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
    """Returns the functions that the event loop is in, the outermost first; empty while it waits.

    Of other packages only the innermost.
    """
    found: list[str] = []
    at: FrameType | None = frame
    while at is not None and _module(at) != _RUNS_THE_LOOP:
        if _module(at).partition(".")[0] == _OWN_PACKAGE or (at is frame and _module(at) not in _WAITS):
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
