"""The metadata of a state directory: a small SQLite database, and the checks that the other files belong to it.

The number of the newest commit is kept outside the database, too, so that an older copy of the database is noticed.
"""

import os
import sqlite3
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

from gradserve_server.storage.directory import (
    DamagedError,
    LostDatabaseError,
    StateDirectory,
    StateError,
    keep_private,
    make_folder,
    remove_file,
    write_file,
)
from gradserve_server.storage.segments import remove_segments

FORMAT = 6
"""The format that this version writes. `_UPGRADES` leads there from all earlier ones."""

_FIRST = """
CREATE TABLE blob (
    id INTEGER PRIMARY KEY,
    arrays TEXT NOT NULL,      -- dtype and shape of each, as JSON
    extents TEXT NOT NULL,     -- their place in the segments, as JSON
    checksums BLOB NOT NULL    -- XXH3 of each chunk, as little-endian uint64
) STRICT;
CREATE TABLE accumulator (
    id INTEGER PRIMARY KEY,
    container TEXT NOT NULL,
    name TEXT NOT NULL,
    owner TEXT NOT NULL DEFAULT '',  -- the identity that it is private to
    incarnation TEXT NOT NULL,
    durability TEXT NOT NULL,
    spec TEXT NOT NULL,
    lifetime TEXT NOT NULL,
    UNIQUE (container, name)
) STRICT;
CREATE TABLE event (
    accumulator INTEGER NOT NULL REFERENCES accumulator ON DELETE CASCADE,
    position INTEGER NOT NULL,
    record TEXT NOT NULL,
    PRIMARY KEY (accumulator, position)
) STRICT, WITHOUT ROWID;
CREATE TABLE ledger (           -- what the events up to a position have led to
    accumulator INTEGER PRIMARY KEY REFERENCES accumulator ON DELETE CASCADE,
    position INTEGER NOT NULL,
    record TEXT NOT NULL
) STRICT;
CREATE TABLE gradient (         -- those of rounds that have not ended
    accumulator INTEGER NOT NULL REFERENCES accumulator ON DELETE CASCADE,
    position INTEGER NOT NULL,
    contribution TEXT NOT NULL,
    names TEXT NOT NULL,
    blob INTEGER NOT NULL REFERENCES blob,
    PRIMARY KEY (accumulator, position)
) STRICT, WITHOUT ROWID;
CREATE TABLE average (
    accumulator INTEGER NOT NULL REFERENCES accumulator ON DELETE CASCADE,
    round INTEGER NOT NULL,
    record TEXT NOT NULL,
    names TEXT NOT NULL,
    blob INTEGER NOT NULL REFERENCES blob,
    PRIMARY KEY (accumulator, round)
) STRICT, WITHOUT ROWID;
CREATE TABLE layer (
    id INTEGER PRIMARY KEY,
    container TEXT NOT NULL,
    name TEXT NOT NULL,
    owner TEXT NOT NULL DEFAULT '',  -- the identity that it is private to
    incarnation TEXT NOT NULL,
    creation_id TEXT NOT NULL,
    durability TEXT NOT NULL,
    config TEXT NOT NULL,
    lifetime TEXT NOT NULL,
    UNIQUE (container, name)
) STRICT;
CREATE TABLE layer_event (
    layer INTEGER NOT NULL REFERENCES layer ON DELETE CASCADE,
    position INTEGER NOT NULL,
    record TEXT NOT NULL,
    PRIMARY KEY (layer, position)
) STRICT, WITHOUT ROWID;
CREATE TABLE layer_state (      -- what the events up to a position have led to, but for values
    layer INTEGER PRIMARY KEY REFERENCES layer ON DELETE CASCADE,
    position INTEGER NOT NULL,
    record TEXT NOT NULL
) STRICT;
CREATE TABLE layer_variable (
    layer INTEGER NOT NULL REFERENCES layer ON DELETE CASCADE,
    name TEXT NOT NULL,
    place INTEGER NOT NULL,     -- its index in the blob
    blob INTEGER NOT NULL REFERENCES blob,
    PRIMARY KEY (layer, name)
) STRICT, WITHOUT ROWID;
CREATE TABLE layer_update (     -- mean and variance of a forward whose update is still to come
    layer INTEGER NOT NULL REFERENCES layer ON DELETE CASCADE,
    forward TEXT NOT NULL,
    implementation TEXT NOT NULL,
    blob INTEGER NOT NULL REFERENCES blob,
    PRIMARY KEY (layer, forward)
) STRICT, WITHOUT ROWID;
"""

_SECOND = """
CREATE TABLE part (             -- what a shard holds of gradients, until no round needs them
    accumulator INTEGER NOT NULL REFERENCES accumulator ON DELETE CASCADE,
    home TEXT NOT NULL,         -- the incarnation of the accumulator at its home
    id TEXT NOT NULL,
    local_step INTEGER NOT NULL,
    names TEXT NOT NULL,
    blob INTEGER NOT NULL REFERENCES blob,
    PRIMARY KEY (accumulator, home, id)
) STRICT, WITHOUT ROWID;
CREATE TABLE newest_incarnation (  -- of sharded accumulators whose home this server is: later ones are greater
    place INTEGER PRIMARY KEY CHECK (place = 0),
    number INTEGER NOT NULL
) STRICT;
"""

_THIRD = """
CREATE TABLE directory (        -- the state directory that this file belongs to
    place INTEGER PRIMARY KEY CHECK (place = 0),
    id TEXT NOT NULL,           -- which other files have, too
    commits INTEGER NOT NULL    -- the number of the newest commit
) STRICT;
INSERT INTO directory VALUES (0, lower(hex(randomblob(16))), 0);
ALTER TABLE part ADD COLUMN epoch INTEGER;  -- the only one in which it counts; NULL: any
"""

_FOURTH = """
CREATE TABLE parameters (
    id INTEGER PRIMARY KEY,
    container TEXT NOT NULL,
    name TEXT NOT NULL,
    owner TEXT NOT NULL DEFAULT '',  -- the identity that they are private to
    incarnation TEXT NOT NULL,
    durability TEXT NOT NULL,
    spec TEXT NOT NULL,
    lifetime TEXT NOT NULL,
    UNIQUE (container, name)
) STRICT;
CREATE TABLE parameters_event (
    parameters INTEGER NOT NULL REFERENCES parameters ON DELETE CASCADE,
    position INTEGER NOT NULL,
    record TEXT NOT NULL,
    PRIMARY KEY (parameters, position)
) STRICT, WITHOUT ROWID;
CREATE TABLE parameters_ledger ( -- what the events up to a position have led to
    parameters INTEGER PRIMARY KEY REFERENCES parameters ON DELETE CASCADE,
    position INTEGER NOT NULL,
    record TEXT NOT NULL
) STRICT;
CREATE TABLE parameters_update ( -- those of the round that has not ended
    parameters INTEGER NOT NULL REFERENCES parameters ON DELETE CASCADE,
    position INTEGER NOT NULL,
    contribution TEXT NOT NULL,
    names TEXT NOT NULL,
    blob INTEGER NOT NULL REFERENCES blob,
    PRIMARY KEY (parameters, position)
) STRICT, WITHOUT ROWID;
CREATE TABLE parameters_version (
    parameters INTEGER NOT NULL REFERENCES parameters ON DELETE CASCADE,
    round INTEGER NOT NULL,
    record TEXT NOT NULL,
    names TEXT NOT NULL,
    blob INTEGER NOT NULL REFERENCES blob,
    PRIMARY KEY (parameters, round)
) STRICT, WITHOUT ROWID;
CREATE TABLE parameters_state ( -- that of the optimizer, after the newest version
    parameters INTEGER PRIMARY KEY REFERENCES parameters ON DELETE CASCADE,
    record TEXT NOT NULL,
    blob INTEGER NOT NULL REFERENCES blob
) STRICT;
CREATE TABLE parameters_round ( -- the records of rounds that were applied
    parameters INTEGER NOT NULL REFERENCES parameters ON DELETE CASCADE,
    step INTEGER NOT NULL,
    record TEXT NOT NULL,
    PRIMARY KEY (parameters, step)
) STRICT, WITHOUT ROWID;
"""

_FIFTH = """
CREATE TABLE parameters_part (  -- what a shard holds of updates, until no round needs them
    parameters INTEGER NOT NULL REFERENCES parameters ON DELETE CASCADE,
    home TEXT NOT NULL,         -- the incarnation of the parameters at their home
    id TEXT NOT NULL,
    epoch INTEGER,              -- the only one in which it counts; NULL: any
    local_step INTEGER NOT NULL,
    names TEXT NOT NULL,
    blob INTEGER NOT NULL REFERENCES blob,
    PRIMARY KEY (parameters, home, id)
) STRICT, WITHOUT ROWID;
"""

_SIXTH = """
CREATE TABLE accumulator_round ( -- what was seen of the last rounds, for the status
    accumulator INTEGER NOT NULL REFERENCES accumulator ON DELETE CASCADE,
    round INTEGER NOT NULL,
    record TEXT NOT NULL,
    PRIMARY KEY (accumulator, round)
) STRICT, WITHOUT ROWID;
CREATE TABLE run (              -- accumulators and parameters, durable or not: those that exist, and the last others
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    container TEXT NOT NULL,
    name TEXT NOT NULL,
    has_ended INTEGER NOT NULL DEFAULT 0,
    record TEXT NOT NULL
) STRICT;
"""

_UPGRADES: dict[int, str] = {0: _FIRST, 1: _SECOND, 2: _THIRD, 3: _FOURTH, 4: _FIFTH, 5: _SIXTH}
"""The statements that lead from each format to the next one."""


_BESIDE = ("-wal", "-shm", "-journal")
"""The suffixes that SQLite adds to the name of a database for the files that belong to it."""

UNREADABLE = (sqlite3.DatabaseError, UnicodeDecodeError)
"""The errors of reading a damaged database; the names in some messages of SQLite are bytes of the file."""


FIRST_WITH_ID = 3
"""The first format whose database has the id of its directory."""


def make_database(path: Path) -> sqlite3.Connection:
    """Makes the metadata of a new state directory.

    Raises:
        OSError: They cannot be made.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    connection = _connected(path)
    _upgrade(connection, 0)
    # Otherwise the file would be nothing without its write-ahead log.
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return connection


def open_database(path: Path, oldest: int = 1) -> sqlite3.Connection:
    """Opens the metadata, and brings them to the current format if necessary.

    A transaction of the connection survives a loss of power once it is committed.

    Args:
        path: The file. It and its write-ahead log become private: SQLite gives the log the mode of the file.
        oldest: The oldest format in which they can be; nothing changes in them if they are older.

    Raises:
        LostDatabaseError: There is no file, or nothing in it.
        StateError: The file is damaged, or of a later version; or it is older than it can be, a DamagedError.
    """
    for each in (path, *(path.with_name(path.name + suffix) for suffix in _BESIDE)):
        keep_private(each)
    if not path.exists():
        raise LostDatabaseError(f"{path}: the file is missing")
    if not path.stat().st_size:
        raise LostDatabaseError(f"{path}: the file is empty")
    connection = None
    try:
        connection = _connected(path)
        check_database(connection, path)
        _upgrade(connection, _format_of(connection, path, oldest))
    except UNREADABLE as error:
        _close(connection)
        raise StateError(f"{path}: the database is damaged: {error}") from error
    except BaseException:
        _close(connection)
        raise
    return connection


def _format_of(connection: sqlite3.Connection, path: Path, oldest: int) -> int:
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if not found:
        raise LostDatabaseError(f"{path}: there is nothing in the file")
    if found > FORMAT:
        raise StateError(f"{path}: expected format {FORMAT} or an earlier one, got {found}, of a later gradserve")
    if found < oldest:
        raise DamagedError(f"{path}: expected format {oldest} or a later one, got {found}: it is an older copy")
    return int(found)


@contextmanager
def reading_database(path: Path) -> Iterator[sqlite3.Connection]:
    """Opens the metadata beside their writer, to read from in another thread.

    Raises:
        sqlite3.Error: They cannot be opened.
    """
    # Reading alone takes a URI, in which `as_uri` escapes the characters of the path that mean something else there.
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        yield connection


def remove_database(path: Path) -> None:
    """Removes the metadata, and what SQLite has beside them."""
    for each in (path, *(path.with_name(path.name + suffix) for suffix in _BESIDE)):
        remove_file(each)


def _connected(path: Path) -> sqlite3.Connection:
    # Nothing of the path is special: SQLite reads no name as a URI unless it is told to.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _close(connection: sqlite3.Connection | None) -> None:
    if connection is not None:
        connection.close()


def check_database(connection: sqlite3.Connection, path: Path) -> None:
    """Checks the pages of a database, and that its tables belong together.

    Raises:
        StateError: The database is damaged.
    """
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise StateError(f"{path}: the database is damaged: {verdict}")
    broken = connection.execute("PRAGMA foreign_key_check").fetchone()
    if broken is not None:
        raise StateError(f"{path}: the database is damaged: table {broken[0]!r} refers to a row that does not exist")


def _upgrade(connection: sqlite3.Connection, found: int) -> None:
    for version in range(found, FORMAT):
        connection.executescript(f"BEGIN;{_UPGRADES[version]}PRAGMA user_version = {version + 1};COMMIT;")


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
        try:
            self.number, self.id = _newest_slot(path, os.pread(self._descriptor, 2 * _SLOT_BYTES, 0))
        except DamagedError:
            os.close(self._descriptor)
            raise

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


def newest_commit(path: Path) -> tuple[int, str]:
    """Returns the number of the newest commit and the id of the directory, of a file that a server may be writing.

    Raises:
        DamagedError: The file is damaged.
        OSError: It cannot be read.
    """
    return _newest_slot(path, path.read_bytes()[: 2 * _SLOT_BYTES])


def _newest_slot(path: Path, content: bytes) -> tuple[int, str]:
    found = [slot for start in (_AT_START, _LATEST) if (slot := _unpacked(content[start:]))]
    if not found:
        raise DamagedError(f"{path}: the number of the newest commit is damaged")
    return max(found)


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
            _refuse(directory, faults)
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


def _refuse(directory: StateDirectory, faults: Sequence[str]) -> None:
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
