"""Backups that a server takes of its own state directory, one in each interval, in a thread."""

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gradserve_server.runtime.files import reason_of
from gradserve_server.storage.backup import Backup, back_up, remove_backup, remove_unfinished
from gradserve_server.storage.directory import StateError, StateFiles, make_folder

_log = logging.getLogger(__name__)

_NAME = "%Y%m%dT%H%M%S.%fZ"
"""The names of backups: their times in UTC, so that their order is that of their names."""
_RETRY_SECONDS = 60.0
"""The pause after a failure, unless the interval is shorter."""
_BILLION = 10**9


@dataclass(frozen=True)
class BackupFigures:
    """Figures of the backups that a server takes by itself.

    Attributes:
        num_taken: The number that this run of the server has taken.
        num_failed: The number that it could not take.
        interval_seconds: The time between two.
        newest: The time of the newest one, in seconds since 1970; None if there is none.
        num_bytes: The size of the values in the newest one that this run has taken.
        seconds: The time that it took.
    """

    num_taken: int
    num_failed: int
    interval_seconds: float
    newest: float | None
    num_bytes: int
    seconds: float


class _StoppedError(Exception):
    """The server stops during a backup."""


class BackupSchedule:
    """The schedule by which a server backs up its state directory and removes old backups. Used on one event loop.

    A server that was started again goes on with the interval: the newest backup counts, whichever run has taken it.
    """

    def __init__(
        self, directory: Path, folder: Path, interval_seconds: float, num_kept: int, wall_clock: Callable[[], int]
    ) -> None:
        """Takes the state directory of the server, and what to do.

        Args:
            directory: The state directory.
            folder: The folder for the backups, which is made if it does not exist.
            interval_seconds: The time from one backup to the next.
            num_kept: The number of backups that are kept.
            wall_clock: Returns the time in nanoseconds since 1970.
        """
        self._directory = directory
        self._folder = folder
        self._interval_seconds = interval_seconds
        self._num_kept = num_kept
        self._wall_clock = wall_clock
        self._stop = threading.Event()
        self._num_taken = self._num_failed = 0
        self._newest: float | None = None
        self._latest: Backup | None = None

    @property
    def figures(self) -> BackupFigures:
        """The figures of the backups. Read on the event loop."""
        latest = self._latest
        return BackupFigures(
            num_taken=self._num_taken,
            num_failed=self._num_failed,
            interval_seconds=self._interval_seconds,
            newest=self._newest,
            num_bytes=0 if latest is None else latest.num_bytes,
            seconds=0.0 if latest is None else latest.seconds,
        )

    async def run(self) -> None:
        """Takes backups until it is cancelled; then the one under way is given up, and what there is of it removed."""
        pause = 0.0
        while True:
            await asyncio.sleep(pause)
            work = asyncio.get_running_loop().run_in_executor(None, self._take_if_due)
            try:
                pause = await asyncio.shield(work)
            except asyncio.CancelledError:
                self._stop.set()
                with suppress(_StoppedError):
                    await work
                raise

    def _take_if_due(self) -> float:
        """Takes a backup if it is time, in a thread; returns the seconds until the next look."""
        try:
            newest = self._newest_time()
            now = self._wall_clock() / _BILLION
            if newest is not None:
                self._newest = newest
                # A clock that was set back must not put the next one off for longer.
                left = min(newest + self._interval_seconds - now, self._interval_seconds)
                if newest <= now and left > 0:
                    return left
            self._take(now)
        except (StateError, OSError, sqlite3.Error) as error:
            self._num_failed += 1
            reason = f"{error.filename}: {reason_of(error)}" if isinstance(error, OSError) else str(error)
            _log.error("there is no new backup of %s: %s", self._directory, reason)
            return min(_RETRY_SECONDS, self._interval_seconds)
        return self._interval_seconds

    def _newest_time(self) -> float | None:
        make_folder(self._folder)
        times = [_time_of(each.name) for each in self._backups()]
        return max((each for each in times if each is not None), default=None)

    def _take(self, now: float) -> None:
        remove_unfinished(self._folder, lambda name: _time_of(name) is not None)
        path = self._folder / datetime.fromtimestamp(now, UTC).strftime(_NAME)
        taken = back_up(self._directory, path, self._check_goes_on)
        self._num_taken, self._latest, self._newest = self._num_taken + 1, taken, now
        _log.info("backup %s: commit %d, %d bytes, in %.1f s", taken.path, taken.commit, taken.num_bytes, taken.seconds)
        for each in self._backups()[: -self._num_kept]:
            remove_backup(each)
            _log.info("removed the backup %s", each)

    def _check_goes_on(self, _num_bytes: int) -> None:
        if self._stop.is_set():
            raise _StoppedError

    def _backups(self) -> list[Path]:
        """Returns the backups of this directory, the oldest first; not those of others in the folder."""
        mine = StateFiles(self._directory).read_id()
        found = []
        for path in sorted(self._folder.iterdir()):
            files = StateFiles(path)
            with suppress(StateError, OSError):
                if _time_of(path.name) is not None and files.is_backup and files.read_id() == mine:
                    found.append(path)
        return found


def _time_of(name: str) -> float | None:
    """Returns the time in the name of a backup, in seconds since 1970; None for other names."""
    try:
        return datetime.strptime(name, _NAME).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
