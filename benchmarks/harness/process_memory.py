"""The memory that a process adds to the machine, from Linux's /proc.

Memory that two processes share is resident in both, but it belongs to one of them. A file in memory (memfd) that
another process has mapped for writing belongs to that one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

_FIELDS = ("RssAnon", "RssFile", "RssShmem")
_SHARED_WRITABLE = "rw-s"


def resident_bytes(pid: int) -> int:
    """Returns the resident memory, shared memory included."""
    return sum(status_bytes(pid, field) for field in _FIELDS)


def own_bytes(pid: int, others: Iterable[int]) -> int:
    """Returns the resident memory without the files in memory that other processes have mapped for writing."""
    theirs = {inode for other in others for permissions, inode in _memfds(other) if permissions == _SHARED_WRITABLE}
    if not theirs:
        return resident_bytes(pid)
    return resident_bytes(pid) - sum(num_bytes for inode, num_bytes in _resident_memfds(pid) if inode in theirs)


def status_bytes(pid: int, field: str) -> int:
    """Returns a memory field of /proc/PID/status."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    match = re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)
    if match is None:
        raise OSError(f"/proc/{pid}/status has no {field}")
    return int(match.group(1)) * 1024


def _memfds(pid: int) -> Iterator[tuple[str, str]]:
    """Yields the permissions and the inode of each mapping of a file in memory."""
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
        if "/memfd:" in line:
            _, permissions, _, _, inode, _ = line.split(maxsplit=5)
            yield permissions, inode


def _resident_memfds(pid: int) -> Iterator[tuple[str, int]]:
    """Yields the inode and the resident bytes of each mapping of a file in memory."""
    inode = None
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        if "/memfd:" in line:
            inode = line.split(maxsplit=5)[4]
        elif inode is not None and line.startswith("Rss:"):
            yield inode, int(line.split()[1]) * 1024
            inode = None
