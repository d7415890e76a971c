"""A call that a thread of its own makes."""

import threading
from collections.abc import Callable
from typing import Any

from gradserve.transport.blocking.sockets import Watch


class ThreadedCall:
    """A call that a thread makes, and another one can cancel."""

    def __init__(self, make: Callable[[Watch], Any]) -> None:
        """Takes the function that makes the call. It says how to interrupt what it does next."""
        self._make = make
        self._lock = threading.Lock()
        self._interrupt: Callable[[], object] | None = None
        self._is_cancelled = False
        self._answer: Any = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, report: Callable[[], object]) -> None:
        """Begins the call; `report` is called when it has ended."""
        self._thread = threading.Thread(target=self._run, args=(report,), name="gradserve-call", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Interrupts the call."""
        with self._lock:
            self._is_cancelled = True
            if self._interrupt is not None:
                self._interrupt()

    def result(self) -> Any:
        """Returns the answer of the ended call, or raises its error."""
        if self._error is not None:
            raise self._error
        return self._answer

    def join(self) -> None:
        """Waits until the call has ended."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, report: Callable[[], object]) -> None:
        try:
            self._answer = self._make(self._watch)
        except BaseException as error:
            self._error = error
        report()

    def _watch(self, interrupt: Callable[[], object]) -> None:
        with self._lock:
            self._interrupt = interrupt
            if self._is_cancelled:
                interrupt()
