"""The processor time of a process and all its descendants, from Linux's /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_USER_TICKS, _SYSTEM_TICKS = 11, 12
"""The positions in /proc/PID/stat, counted after the name of the program."""


def processor_seconds(pid: int) -> float:
    """Returns the user and kernel time that the process and its running descendants have used so far."""
    return sum(_own_ticks(each) for each in _family(pid)) / _TICKS_PER_SECOND


def _own_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])


def _family(pid: int) -> Iterator[int]:
    yield pid
    for thread in os.listdir(f"/proc/{pid}/task"):
        children = Path(f"/proc/{pid}/task/{thread}/children")
        try:
            pids = children.read_text(encoding="ascii").split()
        except OSError:  # the thread has ended
            continue
        for child in pids:
            yield from _family(int(child))
