"""Runs one piece of work on several threads."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

_log = logging.getLogger(__name__)


class ForkJoin:
    """A few helper threads, for kernels that release the GIL.

    Safe to use from several threads: callers work themselves, and wait only for helpers that have begun, so they make
    progress even when all helpers are busy with other work.

    Waking up a thread takes little more than a lock. Futures take 20 microseconds to start and, as the caller then
    sleeps for a moment, 50 to end, which is as long as computing on a megabyte.
    """

    def __init__(self, num_threads: int) -> None:
        """Runs work on up to `num_threads` threads, including the caller."""
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._helpers = [
            threading.Thread(target=self._help, name=f"gradserve-kernel-{index}", daemon=True)
            for index in range(num_threads - 1)
        ]
        for helper in self._helpers:
            helper.start()

    @property
    def num_threads(self) -> int:
        """The most threads that work together, including the caller."""
        return len(self._helpers) + 1

    def run(self, work: Callable[[], object], num_parts: int) -> None:
        """Calls `work` in this thread, and at the same time in free helpers.

        Args:
            work: Does one part after another until none is left, then waits for the parts of its other calls: when one
                call returns, everything is done, and a later call finds nothing to do.
            num_parts: The number of parts: no more threads than that are woken up.

        Raises:
            BaseException: The exception of `work` in this thread. Exceptions in others are logged: their parts are
                missing, so if this can happen, `work` must tell its other calls.
        """
        call = _Call(work)
        for _ in range(min(len(self._helpers), num_parts - 1)):
            self._calls.put(call)
        try:
            work()
        finally:
            call.work = None

    def run_all(self, pieces: Sequence[Callable[[], object]]) -> None:
        """Calls independent functions, several at the same time, and returns when all have returned.

        Raises:
            BaseException: The exception of the first function that failed; the others have been called, too.
        """
        if len(pieces) == 1:
            pieces[0]()
            return
        work = _Pieces(pieces)
        self.run(work.take, len(pieces))
        work.wait()

    def close(self) -> None:
        """Waits for running work, and ends the threads."""
        for _ in self._helpers:
            self._calls.put(None)
        for helper in self._helpers:
            helper.join()

    def _help(self) -> None:
        while (call := self._calls.get()) is not None:
            call.help()
            del call


class _Pieces:
    def __init__(self, pieces: Sequence[Callable[[], object]]) -> None:
        self._waiting = deque(pieces)
        self._num_pieces = len(pieces)
        self._finished: deque[BaseException | None] = deque()
        """The exception of each piece, or None."""
        self._all_finished = threading.Event()
        if not pieces:
            self._all_finished.set()

    def take(self) -> None:
        while True:
            try:
                piece = self._waiting.popleft()
            except IndexError:
                return
            self._finished.append(_attempt(piece))
            if len(self._finished) == self._num_pieces:
                self._all_finished.set()

    def wait(self) -> None:
        self._all_finished.wait()
        for error in self._finished:
            if error is not None:
                raise error


def _attempt(piece: Callable[[], object]) -> BaseException | None:
    try:
        piece()
    except BaseException as error:
        return error
    return None


class _Call:
    """Work for helpers while `work` is there. Afterwards it holds no memory, even if no helper has come."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work: Callable[[], object] | None = work

    def help(self) -> None:
        work = self.work
        if work is None:
            return
        try:
            work()
        except BaseException:
            _log.exception("work in a helper thread failed")
