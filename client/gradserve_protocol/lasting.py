"""Work that goes on as long as a server or a client: if it fails, the log says so, and it begins again."""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable

PAUSE_SECONDS = 1.0
"""The pause before failed work begins again. Joining a thread takes no longer than that."""
_QUIET_SECONDS = 60.0


class Failures:
    """The failures of one piece of work, of which a line with a traceback is logged at most once a minute."""

    def __init__(self, what: str, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        """Keeps the name of the work for the log; the clock is monotonic, in seconds."""
        self._what = what
        self._log = log
        self._clock = clock
        self._reported = float("-inf")
        self._left_out = 0

    def note(self, error: Exception) -> None:
        """Logs a failure, unless one was logged within the last minute."""
        now = self._clock()
        if now - self._reported < _QUIET_SECONDS:
            self._left_out += 1
            return
        before = f" ({self._left_out} earlier failures were left out)" if self._left_out else ""
        self._reported, self._left_out = now, 0
        self._log.error("%s failed and starts again%s", self._what, before, exc_info=error)


async def keep_doing(what: str, work: Callable[[], Awaitable[None]], log: logging.Logger) -> None:
    """Does work until it returns or is cancelled; begins it again whenever it fails.

    Args:
        what: The name of the work, as the log says it.
        work: Begins it. It must bear being begun again after a failure at any point.
        log: The log for failures.
    """
    failures = Failures(what, log)
    while True:
        try:
            return await work()
        except Exception as error:
            failures.note(error)
        await asyncio.sleep(PAUSE_SECONDS)


def lasting_task(what: str, work: Callable[[], Awaitable[None]], log: logging.Logger) -> asyncio.Task[None]:
    """Returns a task of the running event loop that does work as `keep_doing` does."""
    return asyncio.get_running_loop().create_task(keep_doing(what, work, log), name=what)


def lasting_thread(what: str, work: Callable[[], None], log: logging.Logger, name: str) -> threading.Thread:
    """Starts a daemon thread that does work until it returns, and begins it again whenever it fails.

    Args:
        what: The name of the work, as the log says it.
        work: Does it; see `keep_doing`.
        log: The log for failures.
        name: The name of the thread.
    """

    def run() -> None:
        failures = Failures(what, log)
        while True:
            try:
                return work()
            except Exception as error:
                failures.note(error)
            time.sleep(PAUSE_SECONDS)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
