"""The folder of a server's state: its lock, its mark, durable small files, and the errors of damaged state."""

import contextlib
import fcntl
import os
import re
import stat
from pathlib import Path

from gradserve_server.errors import ServiceError

DAMAGES = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    AssertionError,
    RecursionError,
    ServiceError,
)
"""The errors that reading a damaged record can raise."""


class StateError(Exception):
    """A state directory cannot be used. The message names the file, and says what is wrong with it."""


class DamagedError(StateError):
    """A part of a state directory is damaged, which `gradserve state repair` can remove."""


class LostDatabaseError(DamagedError):
    """The metadata of a state directory are gone, and with them all that was in it."""


_LOCK = "lock"
_MARK = "gradserve-state"
"""A file that only state directories have. It says how far the directory has come."""
_TEXT = "This directory belongs to a gradserve server. Do not change it.\n"
"""All that is in the mark of versions whose state directories had no id."""
_WITH_ID = re.compile(re.escape(_TEXT) + "id ([0-9a-f]{32})\n")
_UNFINISHED = "A gradserve server makes this directory. Nothing is in it yet.\n"
_OTHERS = (_LOCK, f".{_MARK}", "lost+found")
"""Names that may be in a folder before it becomes a state directory."""


class StateDirectory:
    """A state directory, which one process uses at a time.

    Attributes:
        path: The folder.
        id: The id of the directory, which is in its mark, its database and beside its segments; empty for a directory
            of an earlier version, and if the mark is damaged.
        is_new: True until the directory is complete: until then its contents are worthless.
    """

    def __init__(self, path: Path, *, make: bool = True) -> None:
        """Locks a state directory.

        Args:
            path: The folder.
            make: Whether to make one if it does not exist, or is empty.

        Raises:
            StateError: It is something else, or another process uses it.
            OSError: It cannot be made or opened.
        """
        self.path = path
        if not self._mark.exists():
            self._check_empty(make)
            make_folder(path)
        self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._mark.exists():  # only now: another process may have made it a moment ago
                write_file(self._mark, _UNFINISHED.encode())
            text = self._mark.read_text(errors="replace")
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise StateError(f"{path}: another process uses this state directory") from None
            raise
        for name in (_LOCK, _MARK):
            keep_private(path / name)
        found = _WITH_ID.fullmatch(text)
        self.id = "" if found is None else found[1]
        self.is_new = text == _UNFINISHED
        self._is_damaged = found is None and not self.is_new and text != _TEXT

    def close(self) -> None:
        """Unlocks the directory."""
        os.close(self._lock)

    @property
    def database(self) -> Path:
        """The file of the metadata."""
        return self.path / "metadata.sqlite"

    @property
    def segments(self) -> Path:
        """The folder of the segments."""
        return self.path / "segments"

    @property
    def commits(self) -> Path:
        """The file with the number of the newest commit, beside the segments."""
        return self.segments / "commits"

    @property
    def _mark(self) -> Path:
        return self.path / _MARK

    def check_mark(self) -> None:
        """Checks that the mark is as it was written.

        Raises:
            DamagedError: It is not.
        """
        if self._is_damaged:
            raise DamagedError(f"{self._mark}: the mark of the state directory is damaged")

    def begin_anew(self) -> None:
        """Discards the contents: the next process that opens the directory creates it again."""
        write_file(self._mark, _UNFINISHED.encode())
        self.id, self.is_new, self._is_damaged = "", True, False

    def identify(self, directory_id: str) -> None:
        """Gives the directory an id, when its files have it. From now on, none of them may be missing or older."""
        write_file(self._mark, f"{_TEXT}id {directory_id}\n".encode())
        self.id, self.is_new, self._is_damaged = directory_id, False, False

    def _check_empty(self, make: bool) -> None:
        """Checks that the folder can become a state directory, if it may."""
        if not self.path.exists():
            if not make:
                raise StateError(f"{self.path}: there is no state directory")
            return
        if not self.path.is_dir():
            raise StateError(f"{self.path}: expected a directory")
        others = [each.name for each in self.path.iterdir() if each.name not in _OTHERS]
        if others or not make:
            found = f"it has {sorted(others)[0]!r}" if others else "it is empty"
            raise StateError(f"{self.path}: expected a state directory of gradserve, but {found} and no {_MARK!r}")


_FILE_MODE = 0o600
_FOLDER_MODE = 0o700


def write_file(path: Path, content: bytes) -> None:
    """Makes or replaces a file atomically: after a loss of power it has the old or the new content."""
    beside = path.with_name(f".{path.name}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, _FILE_MODE)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    keep_private(beside)
    beside.replace(path)
    flush_folder(path.parent)


def make_folder(path: Path) -> None:
    """Makes a folder that survives a loss of power, if it does not exist."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=_FOLDER_MODE)
        flush_folder(path.absolute().parent)


def flush_folder(folder: Path) -> None:
    """Makes the names in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_file(path: Path) -> None:
    """Removes a file, if there is one; it is gone after a loss of power, too."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        flush_folder(path.parent)


def keep_private(path: Path) -> None:
    """Makes a file of an earlier version private to its owner. A file of another owner stays as it is."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path.is_file() and not path.is_symlink() and mode & ~_FILE_MODE:
            path.chmod(mode & _FILE_MODE)
