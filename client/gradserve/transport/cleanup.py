"""Work that is left when an object was garbage-collected without having been closed."""

import logging
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

_log = logging.getLogger(__name__)


class Cleanup:
    """Work to do after one object has been garbage-collected, unless it was closed before.

    The garbage collector interrupts any thread anywhere, which may hold any lock. So the finalizer only puts the work
    into a queue, and a thread does it. That lives as long as there are objects that may be forgotten.
    """

    def __init__(self, owner: object, work: Callable[[], object]) -> None:
        """Takes the object, and the work, which must not refer to it."""
        self._queue = _queue
        self._finalizer = weakref.finalize(owner, _queue.put, work)
        self._finalizer.atexit = False
        self._queue.expect()

    def call_off(self) -> None:
        """Notes that the object was closed. Can be called again."""
        if self._finalizer.detach() is not None:
            self._queue.put(_nothing)


class _Queue:
    """The work of a process, and the thread that does it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._due: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_expected = 0

    def expect(self) -> None:
        """Makes sure that the thread waits for one more piece of work."""
        with self._lock:
            self._num_expected += 1
            if self._num_expected == 1:
                threading.Thread(target=self._run, name="gradserve-cleanup", daemon=True).start()

    def put(self, work: Callable[[], object]) -> None:
        """Takes work. Takes no lock, as a finalizer may call it; in a fork, drops the work."""
        if os.getpid() == self._pid:
            self._due.put(work)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            work = self._due.get()
            try:
                work()
            except Exception:
                _log.exception("what a forgotten object has left could not be cleaned up")
            del work  # and what it refers to, before the next one comes
            with self._lock:
                self._num_expected -= 1
                is_over = not self._num_expected


def _nothing() -> None:
    """Is done in the place of work that was called off."""


_queue = _Queue()


def _begin_anew() -> None:
    global _queue
    _queue = _Queue()


if hasattr(os, "register_at_fork"):
    # The thread is not in a fork, and what its process has left open is not the fork's.
    os.register_at_fork(after_in_child=_begin_anew)
