"""Opens the files of a state directory, and checks that they belong together and that none is older than another.

The number of the newest commit is kept outside the database, so that an older copy of the database is noticed.
"""

import os
import sqlite3
import struct
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

from gradserve_server.storage.database import (
    FIRST_WITH_ID,
    UNREADABLE,
    make_database,
    open_database,
    remove_database,
)
from gradserve_server.storage.directory import (
    DamagedError,
    LostDatabaseError,
    StateDirectory,
    StateError,
    keep_private,
    make_folder,
    write_file,
)
from gradserve_server.storage.segments import remove_segments

_SLOT = struct.Struct("<32sQ")
"""The id of the directory, and the number of a commit."""
_CHECKSUM = struct.Struct("<Q")
_SLOT_BYTES = 4096
"""Slots do not share a block, so that a write that a loss of power tears leaves the other one."""
_AT_START, _LATEST = 0, _SLOT_BYTES
"""The places of the two slots: that of the start is on disk before the other one is written, and stays as it is."""


class CommitFile:
    """The file with the number of the newest commit.

    It is written after each durable commit, and not flushed. So after a loss of power the number may be lower than that
    of the newest commit, never higher.

    Attributes:
        path: The file.
        id: The id of the state directory.
        number: The number of the newest commit.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file.

        Raises:
            DamagedError: It is missing, or damaged.
            OSError: It cannot be opened.
        """
        self.path = path
        keep_private(path)
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise DamagedError(f"{path}: the file is missing, which has the number of the newest commit") from None
        content = os.pread(self._descriptor, 2 * _SLOT_BYTES, 0)
        found = [slot for start in (_AT_START, _LATEST) if (slot := _unpacked(content[start:]))]
        if not found:
            os.close(self._descriptor)
            raise DamagedError(f"{path}: the number of the newest commit is damaged")
        self.number, self.id = max(found)

    @classmethod
    def make(cls, path: Path, directory_id: str, number: int) -> Self:
        """Makes or replaces the file."""
        write_file(path, _packed(directory_id, number).ljust(2 * _SLOT_BYTES, b"\0"))
        return cls(path)

    def write(self, number: int) -> None:
        """Notes that a commit survives a loss of power."""
        self.number = number
        os.pwrite(self._descriptor, memoryview(_packed(self.id, number)), _LATEST)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)


def _packed(directory_id: str, number: int) -> bytes:
    packed = _SLOT.pack(directory_id.encode(), number)
    return packed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed))


def _unpacked(content: bytes) -> tuple[int, str] | None:
    """Returns the number and the id of a slot; None if it is empty or was written in part."""
    packed = content[: _SLOT.size + _CHECKSUM.size]
    if len(packed) < _SLOT.size + _CHECKSUM.size:
        return None
    directory_id, number = _SLOT.unpack_from(packed)
    try:
        found = number, directory_id.decode("ascii")
    except UnicodeDecodeError:
        return None
    return found if _packed(found[1], number) == packed else None


@dataclass
class OpenFiles:
    """The metadata of a state directory, and what is beside them.

    Attributes:
        database: The database.
        commits: The number of the newest commit, outside the database; None if there are faults.
        faults: The reasons why these files cannot be used as they are.
    """

    database: sqlite3.Connection
    commits: CommitFile | None
    faults: tuple[str, ...] = ()


def open_files(directory: StateDirectory, *, damaged: bool) -> OpenFiles:
    """Opens the metadata of a state directory, which are made if it is new.

    Args:
        directory: The directory.
        damaged: Whether to open the database even if there are faults.

    Raises:
        LostDatabaseError: The database is gone.
        DamagedError: There are faults: files are missing, or older than others, or of another directory.
        StateError: The database is damaged, or of a later version.
        OSError: A file cannot be made or opened.
    """
    database = _made(directory) if directory.is_new else _opened(directory, damaged=damaged)
    try:
        faults = () if directory.is_new else tuple(_faults(directory, database))
        if not damaged:
            _check(directory, faults)
        return OpenFiles(database, None if faults else identify(directory, database), faults)
    except BaseException:
        database.close()
        raise


def _made(directory: StateDirectory) -> sqlite3.Connection:
    remove_database(directory.database)
    remove_segments(directory.segments)
    return make_database(directory.database)


def _opened(directory: StateDirectory, *, damaged: bool) -> sqlite3.Connection:
    try:
        if not damaged:
            directory.check_mark()
        return open_database(directory.database, FIRST_WITH_ID if directory.id and not damaged else 1)
    except LostDatabaseError as error:
        raise LostDatabaseError(f"{error}, but the state directory was in use: {_way_out(directory)}") from None
    except DamagedError as error:
        raise DamagedError(f"{error}: {_way_out(directory)}") from None


def _check(directory: StateDirectory, faults: Sequence[str]) -> None:
    if faults:
        raise DamagedError(f"{'; '.join(faults)}: {_way_out(directory)}")


def _way_out(directory: StateDirectory) -> str:
    return (
        "restore the whole directory from a backup, or see what "
        f"`gradserve state repair {directory.path}` makes of what is left"
    )


def identify(directory: StateDirectory, database: sqlite3.Connection) -> CommitFile:
    """Makes the files beside a database agree with it."""
    found, number = identity_of(directory, database)
    make_folder(directory.segments)
    commits = CommitFile.make(directory.commits, found, number)
    if directory.id != found:
        directory.identify(found)  # at last: an interruption before leaves the directory as new, or as old, as it was
    return commits


def identity_of(directory: StateDirectory, database: sqlite3.Connection) -> tuple[str, int]:
    """Returns the id of the directory to which a database belongs, and the number of its newest commit."""
    try:
        ((found, number),) = database.execute("SELECT id, commits FROM directory").fetchall()
    except (*UNREADABLE, ValueError) as error:
        raise StateError(f"{directory.database}: the database is damaged: {error}") from error
    return found, number


def _faults(directory: StateDirectory, database: sqlite3.Connection) -> list[str]:
    faults = []
    is_earlier = False
    try:
        directory.check_mark()
        is_earlier = not directory.id
    except DamagedError as error:
        faults.append(str(error))
    if is_earlier:
        return faults  # It gets an id now. Earlier versions had no number of commits outside the database.
    found, number = identity_of(directory, database)
    if directory.id and found != directory.id:
        faults.append(
            f"{directory.database}: expected the database of the directory {directory.id}, got that of {found}"
        )
    try:
        with closing(CommitFile(directory.commits)) as commits:
            if commits.id != found:
                faults.append(f"{commits.path}: expected a file of the directory {found}, got one of {commits.id}")
            elif commits.number > number:
                faults.append(
                    f"{directory.database}: expected commit {commits.number} or a later one, got {number}: its "
                    "write-ahead log (metadata.sqlite-wal) is missing, cut off or older, or the file is an older copy; "
                    f"{commits.number - number} commits are lost"
                )
    except DamagedError as error:
        faults.append(str(error))
    return faults
