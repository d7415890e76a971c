"""A file whose blocks are there already, so that writing them again is as fast as the disk."""

from __future__ import annotations

import os
from pathlib import Path

_IO_BYTES = 8 << 20


class PreparedFile:
    """A file that is written from its beginning each time."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        """Makes a file of this size."""
        self._content = memoryview(os.urandom(_IO_BYTES))
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._descriptor, 0, num_bytes)
        self.write(num_bytes)

    def write(self, num_bytes: int) -> None:
        """Writes so many bytes, and returns when they would survive a loss of power."""
        position = 0
        while position < num_bytes:
            count = os.pwrite(self._descriptor, self._content[: num_bytes - position], position)
            os.posix_fadvise(self._descriptor, position, count, os.POSIX_FADV_DONTNEED)  # begins to write to the disk
            position += count
        os.fdatasync(self._descriptor)
