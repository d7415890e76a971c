"""Notices when nobody uses an aggregator any more."""

import asyncio
import fcntl
from pathlib import Path

_LOOK_SECONDS = 1.0


class Users:
    """Those who hold a shared lock on a file. The system takes the lock from whoever ends, in whatever way."""

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it.

        Raises:
            OSError: That is not possible.
        """
        self._file = path.open("ab")

    async def all_gone(self, idle_seconds: float) -> None:
        """Returns when nobody has held the lock for so long; nobody can hold it from then on, until this process ends.

        Who asks for the lock after that waits for the end, and can then start another server.
        """
        loop = asyncio.get_running_loop()
        look_seconds = min(_LOOK_SECONDS, idle_seconds / 4)
        since = loop.time()
        while True:
            await asyncio.sleep(look_seconds)
            if not self._lock():
                since = loop.time()
            elif loop.time() - since >= idle_seconds:
                return
            else:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
