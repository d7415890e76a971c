"""Files that exist while a server lives, such as the one with its addresses, and OS errors in words."""

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
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
