"""The folder of a server's state: who uses it, and in which format it is."""

import fcntl
import os
from pathlib import Path

from gradserve_server.state.files.errors import StateError

_LOCK = "lock"
_MARK = "gradserve-state"
"""A file that only state directories have."""


class StateDirectory:
    """A state directory, which one process uses at a time."""

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
        if not (path / _MARK).exists():
            self._make(make)
        self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise StateError(f"{path}: another process uses this state directory") from None

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

    def _make(self, make: bool) -> None:
        if not self.path.exists():
            if not make:
                raise StateError(f"{self.path}: there is no state directory")
            self.path.mkdir(mode=0o700)
        elif not self.path.is_dir():
            raise StateError(f"{self.path}: expected a directory")
        others = [each.name for each in self.path.iterdir() if each.name not in (_LOCK, "lost+found")]
        if others or not make:
            found = f"it has {sorted(others)[0]!r}" if others else "it is empty"
            raise StateError(f"{self.path}: expected a state directory of gradserve, but {found} and no {_MARK!r}")
        (self.path / _MARK).write_text("This directory belongs to a gradserve server. Do not change it.\n")
