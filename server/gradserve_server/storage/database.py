"""The metadata of a state directory: a small SQLite database."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from gradserve_server.storage.directory import DamagedError, LostDatabaseError, StateError, keep_private, remove_file

FORMAT = 3
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

_UPGRADES: dict[int, str] = {0: _FIRST, 1: _SECOND, 2: _THIRD}
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
        _check(connection, path)
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


def _check(connection: sqlite3.Connection, path: Path) -> None:
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise StateError(f"{path}: the database is damaged: {verdict}")
    broken = connection.execute("PRAGMA foreign_key_check").fetchone()
    if broken is not None:
        raise StateError(f"{path}: the database is damaged: table {broken[0]!r} refers to a row that does not exist")


def _upgrade(connection: sqlite3.Connection, found: int) -> None:
    for version in range(found, FORMAT):
        connection.executescript(f"BEGIN;{_UPGRADES[version]}PRAGMA user_version = {version + 1};COMMIT;")
