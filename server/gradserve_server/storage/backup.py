"""Backups: copies of the state of one moment, taken beside the server that goes on changing it, and restored elsewhere.

Nothing of this runs in the server's threads, and no lock makes its writer wait. A backup reads the database in one
transaction, which SQLite's write-ahead log keeps apart from later ones. Segments are written in place, so they cannot
be linked; but a value stays as it is until its space is used again, which the server puts off while somebody holds
the lock of `kept_from_reuse`. Every value is checked against its checksums on the way.
"""

import fcntl
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from gradserve_server.runtime.files import reason_of
from gradserve_server.storage.database import (
    FORMAT,
    UNREADABLE,
    CommitFile,
    check_database,
    newest_commit,
    reading_database,
    remove_database,
)
from gradserve_server.storage.directory import (
    DamagedError,
    InUseError,
    StateDirectory,
    StateError,
    StateFiles,
    flush_folder,
    make_folder,
)
from gradserve_server.storage.segments import (
    SEGMENT_BYTES,
    Segments,
    StoredArrays,
    checked_chunks,
    kept_from_reuse,
    remove_segments,
    whole_blocks,
)
from gradserve_server.storage.store import StateStore

_FLUSHED_BYTES = 32 << 20
"""The most bytes that are written before a flush: more of them would hold up the flushes of the server."""
_SPARE_BYTES = SEGMENT_BYTES
"""The space that has to remain free beside a copy."""


@dataclass(frozen=True)
class Backup:
    """A backup that was taken.

    Attributes:
        path: Its folder.
        commit: The number of the newest commit in it.
        num_bytes: The size of the values.
        seconds: The time that it took.
    """

    path: Path
    commit: int
    num_bytes: int
    seconds: float


OnCopied: TypeAlias = Callable[[int], object] | None
"""Called with the number of bytes after each MiB or less that was copied; what it raises ends the copy."""


def back_up(directory: Path, backup: Path, on_copied: OnCopied = None) -> Backup:
    """Takes a backup of a state directory, whether a server uses it or not. Blocks for as long as copying takes.

    The backup has its name only once all of it is on disk.

    Args:
        directory: The state directory.
        backup: The folder of the backup, which does not exist or is empty. The one around it exists.
        on_copied: See `OnCopied`.

    Raises:
        StateError: The directory is none or is damaged, the backup does not fit, something is in its place, or a file
            cannot be read or written.
    """
    began = time.monotonic()
    with _written_to(directory):
        _bring_up_to_date(directory)
        _check_new(backup, directory)
    with _written_to(backup), _unfinished(backup) as folder:
        source, target = StateFiles(directory), StateFiles(folder)
        copied = _copy(source, target, on_copied, lambda _database, directory_id: directory_id)
        CommitFile.make(target.commits, copied.id, copied.commit).close()
        target.mark_as(copied.id, backup=True)
        folder.rename(backup)
        flush_folder(backup.absolute().parent)
    return Backup(backup, copied.commit, copied.num_bytes, time.monotonic() - began)


def restore(
    backup: Path,
    directory: Path,
    renew: Callable[[sqlite3.Connection], object],
    on_copied: OnCopied = None,
) -> Backup:
    """Makes a state directory of a backup, which stays as it is. Blocks for as long as copying takes.

    The directory has another id than the one that was backed up. An interrupted one is refused by servers, and can be
    restored again.

    Args:
        backup: The backup.
        directory: The state directory, which does not exist or is empty.
        renew: Changes the database, so that nobody takes the resources for those that went on after the backup.
        on_copied: See `OnCopied`.

    Raises:
        StateError: The backup is none or is damaged, it does not fit, something is in the directory, or a file cannot
            be read or written.
    """
    began = time.monotonic()
    source, target = StateFiles(backup), StateFiles(directory)
    with _written_to(backup):
        if source.read_id() and not source.is_backup:
            raise StateError(f"{backup}: expected a backup of `gradserve state backup`, got a state directory")
        if not target.is_restored:
            _check_vacant(directory, may_have=(target.lock.name, "lost+found"))

    def identify(database: sqlite3.Connection, _: str) -> str:
        renew(database)
        directory_id = secrets.token_hex(16)
        database.execute("UPDATE directory SET id = ?", (directory_id,))
        return directory_id

    with _written_to(directory):
        make_folder(directory)
        with _alone(target.lock):
            target.mark_as_restored()
            remove_database(target.database)
            remove_segments(target.segments)
            copied = _copy(source, target, on_copied, identify)
            CommitFile.make(target.commits, copied.id, copied.commit).close()
            target.mark_as(copied.id)
    return Backup(directory, copied.commit, copied.num_bytes, time.monotonic() - began)


def num_bytes_of(directory: Path) -> int:
    """Returns the size of the values in a state directory or a backup; 0 if that cannot be read."""
    with suppress(sqlite3.Error, ValueError, TypeError), reading_database(StateFiles(directory).database) as database:
        return sum(each.num_bytes for _, each in _blobs(database))
    return 0


def remove_unfinished(folder: Path, is_name: Callable[[str], bool]) -> None:
    """Removes backups from a folder that were interrupted, or whose removal was; not those under way.

    Args:
        folder: The folder with the backups.
        is_name: Returns True for the names of backups that may be removed.
    """
    for path in folder.glob(f".*{_UNFINISHED}"):
        if is_name(path.name[1 : -len(_UNFINISHED)]):
            with suppress(InUseError), _alone(path, is_folder=True):
                shutil.rmtree(path)


def remove_backup(backup: Path) -> None:
    """Removes a backup. It is none any more from the first step on.

    Raises:
        OSError: It cannot be removed.
    """
    unfinished = _unfinished_path(backup)
    backup.rename(unfinished)
    shutil.rmtree(unfinished)


@dataclass(frozen=True)
class _Copied:
    id: str
    commit: int
    num_bytes: int


def _copy(
    source: StateFiles,
    target: StateFiles,
    on_copied: OnCopied,
    identify: Callable[[sqlite3.Connection, str], str],
) -> _Copied:
    """Copies database and segments.

    Args:
        source: The files to copy.
        target: The new ones, in a folder that exists.
        on_copied: See `OnCopied`.
        identify: Returns the id of the copy, given its database and the id of the source.
    """
    directory_id = source.read_id()
    with kept_from_reuse(source.segments):
        # The number is written after its commit, so it is read before the database.
        number, found = newest_commit(source.commits)
        if found != directory_id:
            raise DamagedError(f"{source.commits}: expected a file of the directory {directory_id}, got one of {found}")
        _check_space(target.path, source.database.stat().st_size)
        commit = _copy_database(source, target.database, directory_id, number)
        with closing(sqlite3.connect(target.database, isolation_level=None)) as database:
            check_database(database, target.database)
            database.execute("PRAGMA journal_mode = DELETE")  # one file, which a reader need not be able to write
            database.execute("BEGIN IMMEDIATE")
            copy_id = identify(database, directory_id)
            num_bytes = _copy_values(source, target, database, on_copied)
            database.execute("COMMIT")
    for each in (target.database, target.segments, target.path):
        _flush(each)
    return _Copied(copy_id, commit, num_bytes)


def _copy_database(source: StateFiles, path: Path, directory_id: str, number: int) -> int:
    """Copies the database as it is at one moment; returns the number of its newest commit.

    Args:
        source: The directory.
        path: The copy.
        directory_id: The id of the directory.
        number: The number of a commit that the database must have.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        with reading_database(source.database) as database, closing(sqlite3.connect(path)) as copy:
            database.execute("BEGIN")
            ((version,),) = database.execute("PRAGMA user_version").fetchall()
            if version != FORMAT:
                raise StateError(f"{source.database}: expected format {FORMAT}, got {version}, of another gradserve")
            ((found, commit),) = database.execute("SELECT id, commits FROM directory").fetchall()
            database.backup(copy)  # within the transaction: all of it is of its moment
    except (*UNREADABLE, ValueError) as error:
        raise StateError(f"{source.database}: the database cannot be copied: {error}") from error
    if found != directory_id:
        raise DamagedError(f"{source.database}: expected the database of {directory_id}, got that of {found}")
    if commit < number:
        raise DamagedError(f"{source.database}: expected commit {number} or a later one, got {commit}")
    return int(commit)


def _copy_values(source: StateFiles, target: StateFiles, database: sqlite3.Connection, on_copied: OnCopied) -> int:
    """Copies the values that a database names into new segments, and notes their places in it; returns their size."""
    blobs = list(_blobs(database))
    total = sum(whole_blocks(each.num_bytes) for _, each in blobs)
    _check_space(target.path, total)
    # Neither more files than needed, nor space that nothing uses.
    segment_bytes = max(min(SEGMENT_BYTES, total), whole_blocks(1))
    with (
        closing(Segments(source.segments, only_read=True)) as segments,
        closing(Segments(target.segments, segment_bytes)) as copies,
    ):
        values = _Values(segments, copies, on_copied)
        for number, stored in blobs:
            extents = copies.allocate(stored.num_bytes)
            copies.write(extents, values.of(stored))
            _, places, _ = StoredArrays(stored.specs, extents, stored.checksums).row()
            database.execute("UPDATE blob SET extents = ? WHERE id = ?", (places, number))
        copies.flush()
    return sum(each.num_bytes for _, each in blobs)


class _Values:
    """Reads values for their copies, and flushes what was copied now and then."""

    def __init__(self, segments: Segments, copies: Segments, on_copied: OnCopied) -> None:
        self._segments = segments
        self._copies = copies
        self._on_copied = on_copied
        self._unflushed = 0

    def of(self, stored: StoredArrays) -> Iterator[memoryview]:
        """Yields the bytes of values, chunk by chunk."""
        for chunk in checked_chunks(self._segments, stored):
            yield chunk
            if self._on_copied is not None:
                self._on_copied(len(chunk))
            self._unflushed += len(chunk)
            if self._unflushed >= _FLUSHED_BYTES:
                self._copies.flush()
                self._unflushed = 0


def _blobs(database: sqlite3.Connection) -> Iterator[tuple[int, StoredArrays]]:
    for number, *columns in database.execute("SELECT id, arrays, extents, checksums FROM blob ORDER BY id").fetchall():
        try:
            yield number, StoredArrays.of_row(*columns)
        except (ValueError, TypeError) as error:
            raise DamagedError(f"blob {number} of the database is damaged: {error}") from error


def _bring_up_to_date(directory: Path) -> None:
    """Opens a directory that nobody uses as a server does: finds out what is wrong, and upgrades earlier formats."""
    with suppress(InUseError):
        StateStore(StateDirectory(directory, make=False)).close()


def _check_new(backup: Path, directory: Path) -> None:
    if backup.resolve().is_relative_to(directory.resolve()):
        raise StateError(f"{backup}: expected a folder outside of the state directory {directory}")
    if not backup.parent.is_dir():
        raise StateError(f"{backup}: expected a folder in one that exists, and there is no {backup.parent}")
    _check_vacant(backup)


def _check_vacant(path: Path, may_have: Sequence[str] = ()) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise StateError(f"{path}: expected a new or an empty folder, got a file")
    if found := sorted(each.name for each in path.iterdir() if each.name not in may_have):
        raise StateError(f"{path}: expected a new or an empty folder, but it has {found[0]!r}")


def _check_space(folder: Path, num_bytes: int) -> None:
    free, needed = shutil.disk_usage(folder).free, num_bytes + _SPARE_BYTES
    if free < needed:
        raise StateError(
            f"{folder}: there is not enough space on the disk: expected {needed} bytes or more, got {free}"
        )


_UNFINISHED = ".unfinished"


def _unfinished_path(backup: Path) -> Path:
    return backup.with_name(f".{backup.name}{_UNFINISHED}")


@contextmanager
def _unfinished(backup: Path) -> Iterator[Path]:
    """Makes the folder in which a backup is written, until it gets its name; removes it if it does not."""
    path = _unfinished_path(backup)
    while True:
        make_folder(path)
        with _alone(path, is_folder=True) as is_there:
            if not is_there:
                continue  # another process has given it its name, or removed it, a moment ago
            for each in path.iterdir():  # of a backup that was interrupted
                shutil.rmtree(each) if each.is_dir() else each.unlink()
            try:
                yield path
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise
            return


@contextmanager
def _alone(path: Path, *, is_folder: bool = False) -> Iterator[bool]:
    """Locks a file or folder against others who write a copy; yields False if it is not there any more.

    Raises:
        InUseError: Somebody else has locked it.
        OSError: It cannot be opened.
    """
    access = os.O_RDONLY | os.O_DIRECTORY if is_folder else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(f"{path}: another process is writing a copy there, or uses it") from None
        yield path.exists() and os.path.samestat(path.lstat(), os.fstat(descriptor))
    finally:
        os.close(descriptor)


@contextmanager
def _written_to(path: Path) -> Iterator[None]:
    """Names the file in errors of the system; the copy in those that name none, such as those of a full disk."""
    try:
        yield
    except OSError as error:
        raise StateError(f"{error.filename or path}: {reason_of(error)}") from error


def _flush(path: Path) -> None:
    if path.is_dir():
        flush_folder(path)
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())
