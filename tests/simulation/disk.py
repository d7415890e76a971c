"""A disk that forgets what was not flushed: real files, and what of them survives a loss of power."""

import errno
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.storage.copies import copy_state

SEGMENT_BYTES = 1 << 17


class CrashError(BaseException):
    """The server is gone. Nothing of it may catch this."""


@dataclass
class _Write:
    path: Path
    offset: int
    old: bytes
    new: bytes
    is_lost: bool = False


class SimulatedDisk:
    """What one server writes.

    The files have everything at once, as the page cache does; a crash makes a copy that has what was flushed, and an
    arbitrary part of the rest.

    Attributes:
        on_point: Called at each point between two steps of a write, with its name. May raise CrashError.
        is_full: Whether there is no space for another segment.
        fails_at: The name of the call that fails next: pwrite, fdatasync, or none.
    """

    def __init__(self, path: Path, chance: random.Random) -> None:
        self.path = path
        self.on_point: Callable[[str], object] = lambda _: None
        self.is_full = False
        self.fails_at = ""
        self._chance = chance
        self._unflushed: list[_Write] = []
        self._unsynced: dict[str, bytes] | None = None

    def copy_after_crash(self, copy: Path, *, loses_power: bool) -> None:
        """Makes what the next server finds."""
        copy_state(self.path, copy, ignore=shutil.ignore_patterns("*-shm", "lock"))
        if not loses_power:
            return
        if self._unsynced is not None:
            for name, content in self._unsynced.items():
                (copy / name).write_bytes(content)
        for write in reversed(self._unflushed):
            self._put(copy, write, write.old)
        survivors = [each for each in self._unflushed if self._chance.random() < 0.5]
        for index, write in enumerate(survivors):
            is_torn = index == len(survivors) - 1 and self._chance.random() < 0.5
            self._put(copy, write, write.new[: self._chance.randrange(len(write.new))] if is_torn else write.new)

    def _put(self, copy: Path, write: _Write, content: bytes) -> None:
        path = copy / write.path.relative_to(self.path)
        if path.exists():
            with path.open("r+b") as file:
                file.seek(write.offset)
                file.write(content)

    # Calls of the operating system

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        """Writes to a file; the write survives for certain once it is flushed."""
        self.on_point("write")
        self._maybe_fail("pwrite")
        old = os.pread(descriptor, len(data), offset)
        self._unflushed.append(_Write(self._path(descriptor), offset, old, bytes(data)))
        return os.pwrite(descriptor, data, offset)

    def fdatasync(self, descriptor: int) -> None:
        """Flushes a file. What a flush failed for is lost, as on Linux: the next one says nothing of it."""
        self.on_point("flush")
        path = self._path(descriptor)
        try:
            self._maybe_fail("fdatasync")
        except OSError:
            for each in self._unflushed:
                each.is_lost |= each.path == path
            raise
        self._unflushed = [each for each in self._unflushed if each.is_lost or each.path != path]

    def posix_fallocate(self, descriptor: int, offset: int, size: int) -> None:
        """Makes a file of this size, unless the disk is full."""
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.truncate(descriptor, size)

    def _path(self, descriptor: int) -> Path:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))

    def _maybe_fail(self, call: str) -> None:
        if self.fails_at == call:
            self.fails_at = ""
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    # The database

    def before_commit(self, database: sqlite3.Connection) -> None:
        """Notes what a loss of power leaves of a commit that SQLite does not flush."""
        self.on_point("before the commit")
        (synchronous,) = database.execute("PRAGMA synchronous").fetchone()
        if synchronous < 2 and self._unsynced is None:
            names = ("metadata.sqlite", "metadata.sqlite-wal")
            self._unsynced = {name: (self.path / name).read_bytes() for name in names}


class SimulatedDatabase:
    """The metadata, whose commits are points of a disk."""

    def __init__(self, database: sqlite3.Connection, disk: SimulatedDisk) -> None:
        self._database = database
        self._disk = disk

    def execute(self, statement: str, values: Iterable[Any] = ()) -> sqlite3.Cursor:
        """Carries out a statement."""
        if statement != "COMMIT":
            return self._database.execute(statement, tuple(values))
        self._disk.before_commit(self._database)
        cursor = self._database.execute(statement)
        self._disk.on_point("after the commit")
        return cursor

    def executemany(self, statement: str, rows: Iterable[Any]) -> sqlite3.Cursor:
        """Carries out a statement for each row."""
        return self._database.executemany(statement, rows)
