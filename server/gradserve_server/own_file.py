"""Files that exist while this server lives."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Self


class OwnFile:
    """A file of this server's, which another server may have replaced by its own since."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """See `moved`."""
        self.path = path
        # While it is open, no other file gets the same inode.
        self._descriptor = descriptor

    @classmethod
    def moved(cls, beside: Path, path: Path) -> Self:
        """Moves a file of this server's to its final path, in one step.

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
        """Removes the file if it is still this server's. To be called once."""
        with suppress(OSError):
            if os.path.samestat(self.path.lstat(), os.fstat(self._descriptor)):
                self.path.unlink()
        os.close(self._descriptor)
