"""The folder of a server's state: who uses it, which files are its own, and whether they belong together."""

import fcntl
import os
import re
from pathlib import Path

from gradserve_server.state.files.durable_files import keep_private, make_folder, write_file
from gradserve_server.state.files.errors import DamagedError, StateError

_LOCK = "lock"
_MARK = "gradserve-state"
"""A file that only state directories have. It says how far the directory has come."""
_TEXT = "This directory belongs to a gradserve server. Do not change it.\n"
"""All that is in the mark of versions whose state directories had no id."""
_WITH_ID = re.compile(re.escape(_TEXT) + "id ([0-9a-f]{32})\n")
_UNFINISHED = "A gradserve server makes this directory. Nothing is in it yet.\n"
_OTHERS = (_LOCK, f".{_MARK}", "lost+found")
"""What may be in a folder before it becomes a state directory."""


class StateDirectory:
    """A state directory, which one process uses at a time.

    Attributes:
        path: The folder.
        id: The id of the directory, which is in its mark, its database and beside its segments; empty for a directory
            of an earlier version, and if the mark is damaged.
        is_new: True until the directory was made: what is in it is worth nothing.
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
        """Lets others use it."""
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
        """Gives up what is in the directory: whoever opens it next makes it anew."""
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
