"""Counts the bytes of transfers, and tells callers from time to time."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gradserve.calls.exchange import Track
from gradserve.calls.progress import CallbackError
from gradserve.progress_line import ProgressLine

INTERVAL_SECONDS = 0.05
"""The least time between two reports, but for the first and the last one."""


class TransferProgress:
    """The progress of one call. See `gradserve.calls.progress.Progress`.

    What is reported never falls: a transfer that begins again is reported once it is further than before.
    """

    def __init__(
        self,
        callback: Callable[[int, int], object] | None,
        line: ProgressLine | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: CallbackError | None = None
        self._callback = callback
        self._line = line
        self._clock = clock
        self._num_sent = 0
        self._num_received: int | None = None
        self._num_bytes = 0
        self._moved = 0
        self._told = 0
        self._next = 0.0
        self._has_ended = False

    @classmethod
    def of(cls, wanted: Track) -> Self:
        """Returns the progress that a caller has asked for."""
        if wanted.progress is not True:
            return cls(wanted.progress)
        line = ProgressLine.on_terminal()
        return cls(line, line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None, /
    ) -> None:
        self.failure = None
        if self._line is not None:
            self._line.end()

    def sends(self, num_bytes: int, /) -> None:
        self._num_sent = self._num_bytes = num_bytes
        self._tell(0)

    def receives(self, num_bytes: int, /) -> None:
        if self._num_received is None:
            self._num_received = num_bytes
            self._num_bytes += num_bytes
            self._moved = self._num_sent
            self._tell(self._moved)

    def begin(self, overhead: int = 0, /) -> None:
        self._moved = (0 if self._num_received is None else self._num_sent) - overhead

    def moved(self, num_bytes: int, /) -> None:
        if self.add(num_bytes):
            self.tell()

    def add(self, num_bytes: int, /) -> bool:
        if self.failure is not None:
            raise self.failure  # another strand has ended the call
        self._moved += num_bytes
        return self._told < self._moved < self._num_bytes and self._clock() >= self._next

    def tell(self) -> None:
        self._tell(self._moved)

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._tell(self._num_bytes)

    def _tell(self, num_bytes: int) -> None:
        if self._callback is None:
            return
        try:
            self._callback(num_bytes, self._num_bytes)
        except Exception as error:  # it ends the call, and comes out of it
            self.failure = CallbackError(error)
            raise self.failure from None
        self._told = num_bytes
        self._next = self._clock() + INTERVAL_SECONDS
