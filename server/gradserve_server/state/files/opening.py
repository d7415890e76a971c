"""Opens the files of a state directory, and finds out whether they belong together and none is older than another."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from gradserve_server.state.files.commits import CommitFile
from gradserve_server.state.files.database import (
    FIRST_WITH_ID,
    UNREADABLE,
    make_database,
    open_database,
    remove_database,
)
from gradserve_server.state.files.directory import StateDirectory
from gradserve_server.state.files.durable_files import make_folder
from gradserve_server.state.files.errors import DamagedError, LostDatabaseError, StateError
from gradserve_server.state.files.segments import remove_segments


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
