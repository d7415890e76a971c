"""A line on a terminal that shows how far a transfer is."""

import sys
import time
from collections.abc import Callable
from typing import Self, TextIO

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
        """Ends the line, as far as anything was shown. Can be called again."""
        if self._is_shown:
            self._terminal.write("\n")
            self._terminal.flush()
            self._is_shown = False


def _mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 20):,.1f}"
