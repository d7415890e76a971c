"""The progress of transfers: tells callers from time to time, or shows it as a line on a terminal."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from gradserve.calls.exchange import CallbackError, Track

_BAR_COLUMNS = 24
_TO_THE_END = "\x1b[K"
"""Clears what an earlier, longer text has left on the line."""


class ProgressLine:
    """One line of a terminal: a bar, bytes, and how many there were in a second. Called with both numbers of bytes."""

    def __init__(self, terminal: TextIO, label: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal = terminal
        self._label = f"{label} " if label else ""
        self._clock = clock
        self._began = clock()
        self._is_shown = False

    @classmethod
    def on_terminal(cls, label: str = "") -> Self | None:
        """Returns a line on standard error; None if that is not a terminal."""
        terminal = sys.stderr
        return cls(terminal, label) if terminal is not None and terminal.isatty() else None

    def __call__(self, num_done: int, num_bytes: int) -> None:
        """Shows how many of the bytes were moved."""
        part = num_done / num_bytes if num_bytes else 1.0
        seconds = self._clock() - self._began
        rate = num_done / seconds if seconds > 0 else 0.0
        self._terminal.write(
            f"\r{self._label}[{'#' * int(part * _BAR_COLUMNS):{_BAR_COLUMNS}}] {int(part * 100):3} %  "
            f"{_mebibytes(num_done)} of {_mebibytes(num_bytes)} MiB, {_mebibytes(rate)} MiB/s{_TO_THE_END}"
        )
        self._terminal.flush()
        self._is_shown = True

    def end(self) -> None:
        """Ends the line, if anything was shown. Can be called again."""
        if self._is_shown:
            self._terminal.write("\n")
            self._terminal.flush()
            self._is_shown = False


def _mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 20):,.1f}"


INTERVAL_SECONDS = 0.05
"""The least time between two reports, but for the first and the last one."""


class TransferProgress:
    """The progress of one call. See `gradserve.calls.exchange.Progress`.

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
