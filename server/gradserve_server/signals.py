"""SIGTERM and SIGINT.

To be imported before what takes time to import: so this imports next to nothing.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_NUMBERS = (signal.SIGTERM, signal.SIGINT)

_ONE_STOP_SECONDS = 0.5
"""`timeout`, process managers and terminals signal a process and then its group: that is not somebody's second
thought, and leaves a server that has little to finish the time for it."""

_OVERTIME_SECONDS = 1.0
"""For what follows when the drain time is over: to tell the clients of what was broken off."""


class StopSignals:
    """Ends this process on SIGTERM or SIGINT: with status 0 and in time, or at once on a second signal.

    A handler of Python's runs when the main thread gets to it: not while that loads a library, looks up a host or
    computes. So the signals are blocked, in all threads, and a thread waits for them.
    """

    def __init__(self) -> None:
        """Begins to wait. Until `drain_with`, a signal ends the process at once: it has nothing to lose.

        To be called in the main thread before it starts any other: they, and child processes, inherit what is blocked.
        """
        self._lock = threading.Lock()
        self._drain: tuple[Callable[[], object], float] | None = None
        signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
        for number in _NUMBERS:
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=self._wait, name="gradserve-signals", daemon=True).start()

    def drain_with(self, begin: Callable[[], object], seconds: float) -> None:
        """Says how to end from now on.

        Args:
            begin: Lets the main thread drain and end the process, without waiting for that; called in another thread.
            seconds: After which the process ends anyway, soon.
        """
        with self._lock:
            self._drain = begin, seconds

    def _wait(self) -> None:
        signal.sigwait(_NUMBERS)
        first = time.monotonic()
        with self._lock:
            if self._drain is None:
                os._exit(0)
            begin, seconds = self._drain
        with suppress(RuntimeError):  # the event loop is closed: the process is about to end
            begin()
        second = signal.sigtimedwait(_NUMBERS, seconds + _OVERTIME_SECONDS)
        if second is None:
            os._exit(0)
        time.sleep(max(0.0, first + _ONE_STOP_SECONDS - time.monotonic()))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)
        os.kill(os.getpid(), second.si_signo)
        os._exit(128 + second.si_signo)  # the first process of a container: no signal ends that
