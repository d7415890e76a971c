"""Handles SIGTERM and SIGINT.

Imported before modules that take time to import, so it imports next to nothing.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_NUMBERS = (signal.SIGTERM, signal.SIGINT)

_ONE_STOP_SECONDS = 0.5
"""Seconds in which further signals count as the same stop. `timeout`, process managers and terminals signal a process
and then its group; the server has this time to finish."""

_OVERTIME_SECONDS = 1.0
"""Seconds after the drain time, in which clients are told that their calls were ended."""


class StopSignals:
    """Ends this process on SIGTERM or SIGINT: with status 0 and in time, or at once on a second signal.

    Python runs signal handlers only when the main thread gets to them, not while that loads a library, looks up a host
    or computes. So the signals are blocked in all threads, and a thread of its own waits for them.
    """

    def __init__(self) -> None:
        """Starts waiting. Until `drain_with`, a signal ends the process at once, because it has nothing to lose.

        Call this in the main thread before it starts others: threads and child processes inherit the blocked signals.
        """
        self._lock = threading.Lock()
        self._drain: tuple[Callable[[], object], float] | None = None
        signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
        for number in _NUMBERS:
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=self._wait, name="gradserve-signals", daemon=True).start()

    def drain_with(self, begin: Callable[[], object], seconds: float) -> None:
        """Sets how signals end the process from now on.

        Args:
            begin: Makes the main thread drain and end the process, without waiting for it; called in another thread.
            seconds: The drain time, soon after which the process ends anyway.
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
        with suppress(RuntimeError):  # the event loop is closed, so the process is ending
            begin()
        second = signal.sigtimedwait(_NUMBERS, seconds + _OVERTIME_SECONDS)
        if second is None:
            os._exit(0)
        time.sleep(max(0.0, first + _ONE_STOP_SECONDS - time.monotonic()))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)
        os.kill(os.getpid(), second.si_signo)
        os._exit(128 + second.si_signo)  # no default signal action ends the first process of a container
