"""Files of a state directory that are made in one step, survive a loss of power, and are the server's alone."""

import contextlib
import os
import stat
from pathlib import Path

_FILE_MODE = 0o600
_FOLDER_MODE = 0o700


def write_file(path: Path, content: bytes) -> None:
    """Makes or replaces a file in one step: after a loss of power it has the old content or the new one."""
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
    """Takes a file of an earlier version from everybody but its owner. Another owner's stays as it is."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path.is_file() and not path.is_symlink() and mode & ~_FILE_MODE:
            path.chmod(mode & _FILE_MODE)
