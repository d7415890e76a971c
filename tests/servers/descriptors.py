"""Descriptors of this process: other threads open and close some at any time, so tests look at those of one file."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def open_files() -> Iterator[str]:
    """Yields what the descriptors of this process are; gRPC has pipes and events of its own, now more, now fewer."""
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(f"/proc/self/fd/{each}")


def num_open(file: int | Path | os.stat_result) -> int:
    """Returns how many descriptors of this process are of the same file as a descriptor, a path or a status."""
    status, found = file if isinstance(file, os.stat_result) else os.stat(file), 0
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.path.samestat(os.stat(f"/proc/self/fd/{each}"), status)
    return found
