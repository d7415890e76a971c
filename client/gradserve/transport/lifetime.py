"""The end of a client that was garbage-collected without having been closed."""

import logging
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

_log = logging.getLogger(__name__)
_JOIN_SECONDS = 5.0


class Cleanup:
    """Work to do after one object has been garbage-collected, unless it was closed before.

    The garbage collector interrupts any thread anywhere, which may hold any lock. So the finalizer only puts the work
    into a queue, and a thread does it. That lives as long as there are objects that may be forgotten.
    """

    def __init__(self, owner: object, work: Callable[[], object]) -> None:
        self._cleaner = _Cleaner.with_one_more()
        self._finalizer = weakref.finalize(owner, self._cleaner.put, work)
        self._finalizer.atexit = False

    def call_off(self) -> None:
        """Notes that the object was closed; ends the thread if it was the last one. Can be called again."""
        if self._finalizer.detach() is not None:
            self._cleaner.forgo()


class _Cleaner:
    """A thread, and the work that it has to do. When it expects no more, it ends, and the next object gets another."""

    _lock = threading.Lock()
    _present: "_Cleaner | None" = None

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._num_expected = 0
        self._due: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gradserve-cleanup", daemon=True)
        self._thread.start()

    @classmethod
    def with_one_more(cls) -> "_Cleaner":
        """Returns the present one, which expects one more piece of work."""
        with cls._lock:
            cls._present = cls._present or cls()
            cls._present._num_expected += 1
            return cls._present

    @classmethod
    def begin_anew(cls) -> None:
        """Leaves the objects of a process alone in its fork: the thread is not there, and what is open not its own."""
        cls._lock, cls._present = threading.Lock(), None

    def put(self, work: Callable[[], object]) -> None:
        """Takes work. Takes no lock, as a finalizer may call it; in a fork, drops the work."""
        if os.getpid() == self._pid:
            self._due.put(work)

    def forgo(self) -> None:
        """Expects one piece of work less; returns when the thread has ended, if that was the last one."""
        if self._is_over() and os.getpid() == self._pid:
            self._due.put(None)
            self._thread.join(_JOIN_SECONDS)

    def _is_over(self) -> bool:
        with self._lock:
            self._num_expected -= 1
            if self._num_expected:
                return False
            if _Cleaner._present is self:
                _Cleaner._present = None
            return True

    def _run(self) -> None:
        while (work := self._due.get()) is not None:
            try:
                work()
            except Exception:
                _log.exception("what a forgotten object has left could not be cleaned up")
            del work  # and what it refers to, before the next one comes
            if self._is_over():
                return


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Cleaner.begin_anew)
