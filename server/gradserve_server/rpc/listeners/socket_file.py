"""The file of a Unix socket, which may take the place of a dead server's."""

import errno
import fcntl
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gradserve_server.runtime.files import OwnedFile

_LOCK_SECONDS = 5.0
_LOCK_POLL_SECONDS = 0.01


def bind_socket_file(path: Path, bind: Callable[[Path], object]) -> OwnedFile:
    """Makes a Unix socket at a path, replacing the socket of a server that no longer runs.

    gRPC replaces any socket that it finds at its path, and removes whatever is there in the end. So it binds a unique
    path beside this one, and the socket is renamed afterwards.

    Args:
        path: The absolute path.
        bind: Makes a socket at a given path, and listens on it.

    Raises:
        OSError: A server listens there, or the path holds something other than a socket; it is left as it was.
    """
    beside = path.with_name(f".{secrets.token_hex(3)}")  # Address leaves room for these 7 characters
    with _locked(path.parent):
        _check_free(path)
        bind(beside)
        return OwnedFile.moved(beside, path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lets one server at a time look for a free path in a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        yield  # a folder that is writable but cannot be opened has no lock
        return
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    end = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise OSError(errno.EBUSY, "something keeps its folder locked") from None
            time.sleep(_LOCK_POLL_SECONDS)


def _check_free(path: Path) -> None:
    """Raises OSError unless the path is free, or holds a socket on which nobody listens."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:
            pass  # its queue is full
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
