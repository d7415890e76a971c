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


class InUseError(StateError):
    """Another process uses a state directory."""


_LOCK = "lock"
_MARK = "gradserve-state"
"""A file that only state directories have. It says how far the directory has come."""
_TEXT = "This directory belongs to a gradserve server. Do not change it.\n"
"""All that is in the mark of versions whose state directories had no id."""
_BACKUP_TEXT = "This directory is a backup of a gradserve server's state, for `gradserve state restore`.\n"
_WITH_ID = re.compile(f"(?:{re.escape(_TEXT)}|{re.escape(_BACKUP_TEXT)})id ([0-9a-f]{{32}})\n")
_UNFINISHED = "A gradserve server makes this directory. Nothing is in it yet.\n"
_RESTORED = "A backup of a gradserve server's state is being copied to this directory.\n"
_OTHERS = (_LOCK, f".{_MARK}", "lost+found")
"""Names that may be in a folder before it becomes a state directory."""


class StateFiles:
    """The paths in a state directory, or in a backup of one.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

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
    def mark(self) -> Path:
        """The file that only these folders have."""
        return self.path / _MARK

    @property
    def lock(self) -> Path:
        """The file that is locked while a process uses the folder."""
        return self.path / _LOCK

    @property
    def is_restored(self) -> bool:
        """True if a backup is being copied to this folder, or that was interrupted."""
        return self.mark.exists() and self.mark.read_text(errors="replace") == _RESTORED

    @property
    def is_backup(self) -> bool:
        """True if it is a backup."""
        return self.mark.exists() and self.mark.read_text(errors="replace").startswith(_BACKUP_TEXT)

    def read_id(self) -> str:
        """Returns the id in the mark of a state directory or a backup.

        Raises:
            StateError: There is no such directory, or its mark has no id.
            OSError: The mark cannot be read.
        """
        if not self.mark.exists():
            _check_exists(self.path)
            _check_empty(self.path, may_be_made=False)
        text = self.mark.read_text(errors="replace")
        _refuse_copies(self.path, text, may_be_backup=True)
        found = _WITH_ID.fullmatch(text)
        if found is None:
            raise StateError(f"{self.mark}: the mark has no id: it is damaged, or a server is making the directory")
        return found[1]

    def mark_as_restored(self) -> None:
        """Says that a backup is being copied to this folder, which is of no use until `mark_as`."""
        write_file(self.mark, _RESTORED.encode())

    def mark_as(self, directory_id: str, *, backup: bool = False) -> None:
        """Says that all files are there."""
        write_file(self.mark, f"{_BACKUP_TEXT if backup else _TEXT}id {directory_id}\n".encode())


class StateDirectory(StateFiles):
    """A state directory, which one process uses at a time.

    Attributes:
        path: The folder.
        id: The id of the directory, which is in its mark, its database and beside its segments; empty for a directory
            of an earlier version, and if the mark is damaged.
        is_new: True until the directory is complete: until then its contents are worthless.
    """

    def __init__(self, path: Path, *, make: bool = True, may_be_backup: bool = False) -> None:
        """Locks a state directory.

        Args:
            path: The folder.
            make: Whether to make one if it does not exist, or is empty.
            may_be_backup: Whether it may be a backup, to look at it.

        Raises:
            InUseError: Another process uses it.
            StateError: It is something else.
            OSError: It cannot be made or opened.
        """
        super().__init__(path)
        if not self.mark.exists():
            if not make:
                _check_exists(path)
            _check_empty(path, may_be_made=make)
            make_folder(path)
        self._lock = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self.mark.exists():  # only now: another process may have made it a moment ago
                write_file(self.mark, _UNFINISHED.encode())
            text = self.mark.read_text(errors="replace")
            _refuse_copies(path, text, may_be_backup=may_be_backup)
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise InUseError(f"{path}: another process uses this state directory") from None
            raise
        for each in (self.lock, self.mark):
            keep_private(each)
        found = _WITH_ID.fullmatch(text)
        self.id = "" if found is None else found[1]
        self.is_new = text == _UNFINISHED
        self._is_damaged = found is None and not self.is_new and text != _TEXT

    def close(self) -> None:
        """Unlocks the directory."""
        os.close(self._lock)

    def check_mark(self) -> None:
        """Checks that the mark is as it was written.

        Raises:
            DamagedError: It is not.
        """
        if self._is_damaged:
            raise DamagedError(f"{self.mark}: the mark of the state directory is damaged")

    def begin_anew(self) -> None:
        """Discards the contents: the next process that opens the directory creates it again."""
        write_file(self.mark, _UNFINISHED.encode())
        self.id, self.is_new, self._is_damaged = "", True, False

    def identify(self, directory_id: str) -> None:
        """Gives the directory an id, when its files have it. From now on, none of them may be missing or older."""
        self.mark_as(directory_id)
        self.id, self.is_new, self._is_damaged = directory_id, False, False


def _check_exists(path: Path) -> None:
    if not path.exists():
        raise StateError(f"{path}: there is no state directory")


def _check_empty(path: Path, *, may_be_made: bool = True) -> None:
    """Checks that a folder can become a state directory: that it does not exist, or has nothing in it.

    Raises:
        StateError: It cannot, or is empty and no directory may be made.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise StateError(f"{path}: expected a directory")
    others = sorted(each.name for each in path.iterdir() if each.name not in _OTHERS)
    if others or not may_be_made:
        found = f"it has {others[0]!r}" if others else "it is empty"
        raise StateError(f"{path}: expected a state directory of gradserve, but {found} and no {_MARK!r}")


def _refuse_copies(path: Path, text: str, *, may_be_backup: bool) -> None:
    """Refuses a directory by the text of its mark: one that is not restored yet, and perhaps a backup."""
    if text == _RESTORED:
        raise StateError(
            f"{path}: not all of a backup was copied to this directory: begin `gradserve state restore` again"
        )
    if text.startswith(_BACKUP_TEXT) and not may_be_backup:
        raise StateError(
            f"{path}: this is a backup, and servers leave backups as they are: `gradserve state restore {path} "
            "DIRECTORY` makes a state directory of it"
        )


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
