"""CPU cores and memory available to this process, including the limits of a container."""

import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Returns the memory that this process can use."""
    total: int = psutil.virtual_memory().total
    limit = _first_word(cgroup / "memory.max")
    return min(total, int(limit)) if limit.isdecimal() else total


def num_cores(cgroup: Path = _CGROUP) -> int:
    """Returns the number of threads of this process that can run at once, at least 1."""
    cores = len(os.sched_getaffinity(0))
    quota, *period = _read(cgroup / "cpu.max").split() or [""]
    if quota.isdecimal() and period and int(period[0]):
        cores = min(cores, int(quota) // int(period[0]))
    return max(cores, 1)


def _first_word(path: Path) -> str:
    return next(iter(_read(path).split()), "")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # not in a container, or an older kernel
