"""The number of the newest commit of a state directory, beside its database.

A database that was put back to an earlier state, by a copy without its write-ahead log or with a part of it, is whole
in itself: only something outside it can tell that commits are missing.
"""

import os
import struct
from pathlib import Path
from typing import Self

import xxhash

from gradserve_server.state.files.durable_files import keep_private, write_file
from gradserve_server.state.files.errors import DamagedError

_SLOT = struct.Struct("<32sQ")
"""The id of the directory, and the number of a commit."""
_CHECKSUM = struct.Struct("<Q")
_SLOT_BYTES = 4096
"""Slots do not share a block, so that a write that a loss of power tears leaves the other one."""
_AT_START, _LATEST = 0, _SLOT_BYTES
"""The places of the two slots: that of the start is on disk before the other one is written, and stays as it is."""


class CommitFile:
    """The file with the number of the newest commit.

    It is written after each commit, and not flushed: a number that is there belongs to a commit that survives whatever
    happens. After a loss of power, the number may be lower than the commits that are there, never higher.

    Attributes:
        path: The file.
        id: The id of the state directory.
        number: The number of the newest commit.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file.

        Raises:
            DamagedError: It is missing, or damaged.
            OSError: It cannot be opened.
        """
        self.path = path
        keep_private(path)
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise DamagedError(f"{path}: the file is missing, which has the number of the newest commit") from None
        content = os.pread(self._descriptor, 2 * _SLOT_BYTES, 0)
        found = [slot for start in (_AT_START, _LATEST) if (slot := _unpacked(content[start:]))]
        if not found:
            os.close(self._descriptor)
            raise DamagedError(f"{path}: the number of the newest commit is damaged")
        self.number, self.id = max(found)

    @classmethod
    def make(cls, path: Path, directory_id: str, number: int) -> Self:
        """Makes or replaces the file."""
        write_file(path, _packed(directory_id, number).ljust(2 * _SLOT_BYTES, b"\0"))
        return cls(path)

    def write(self, number: int) -> None:
        """Notes that a commit survives a loss of power."""
        self.number = number
        os.pwrite(self._descriptor, memoryview(_packed(self.id, number)), _LATEST)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)


def _packed(directory_id: str, number: int) -> bytes:
    packed = _SLOT.pack(directory_id.encode(), number)
    return packed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed))


def _unpacked(content: bytes) -> tuple[int, str] | None:
    """Returns the number and the id of a slot; None if it is empty or was written in part."""
    packed = content[: _SLOT.size + _CHECKSUM.size]
    if len(packed) < _SLOT.size + _CHECKSUM.size:
        return None
    directory_id, number = _SLOT.unpack_from(packed)
    try:
        found = number, directory_id.decode("ascii")
    except UnicodeDecodeError:
        return None
    return found if _packed(found[1], number) == packed else None
