"""Files that exist while a server lives, its Unix sockets included, and OS errors in words."""

import errno
import fcntl
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self


def reason_of(error: OSError) -> str:
    """Returns the system's reason for an error, to follow a colon: "address already in use"."""
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


class OwnedFile:
    """A file that this server has made, and that another server may have replaced since."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        # While it is open, no other file gets the same inode.
        self._descriptor = descriptor

    @classmethod
    def moved(cls, beside: Path, path: Path) -> Self:
        """Moves a file of this server to its final path, in one step.

        Raises:
            OSError: The file cannot be moved.
        """
        descriptor = os.open(beside, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            beside.replace(path)
        except OSError:
            os.close(descriptor)
            raise
        return cls(path, descriptor)

    def remove(self) -> None:
        """Removes the file if it is still this server's. Call it once."""
        with suppress(OSError):
            if os.path.samestat(self.path.lstat(), os.fstat(self._descriptor)):
                self.path.unlink()
        os.close(self._descriptor)


def write_addresses(path: Path, addresses: Iterable[object]) -> OwnedFile:
    """Writes addresses, one per line, in one step, so that nobody reads half of the file.

    Raises:
        OSError: The file cannot be written, or something other than an ordinary file is there.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _check_replaceable(path)
        beside.write_text("".join(f"{address}\n" for address in addresses))
        return OwnedFile.moved(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise OSError(f"cannot write the address file {path}: {reason_of(error)}") from None


def _check_replaceable(path: Path) -> None:
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "something other than an ordinary file is there")


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
