"""A state store without a thread."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

from gradserve_server.storage.directory import StateDirectory
from gradserve_server.storage.store import StateStore
from tests.simulation.disk import SimulatedDatabase, SimulatedDisk


class SimulatedStore(StateStore):
    """A store that carries out changes on the event loop, after a random time."""

    def __init__(self, directory: StateDirectory, disk: SimulatedDisk, chance: random.Random) -> None:
        super().__init__(directory)
        self._database: Any = SimulatedDatabase(self._database, disk)
        self._chance = chance
        self._is_writing = False
        self.is_gone = False

    def start(self, on_failure: Callable[[str], object]) -> None:
        """See `StateStore`."""
        self._loop = asyncio.get_running_loop()
        self._on_failure = on_failure
        self._begin()

    @property
    def is_idle(self) -> bool:
        """True if nothing waits to be written."""
        return not self._entries and not self._is_writing

    def abandon(self) -> None:
        """Lets go of the files, as the end of the process does."""
        self.is_gone = True
        self._files.close()

    def _submit(self, entry: Any) -> None:
        self._entries.append(entry)
        self._begin()

    def _begin(self) -> None:
        if self._loop is not None and self._entries and not self._is_writing:
            self._is_writing = True
            self._loop.call_later(self._chance.choice([0.0, 0.001, 0.02, 0.1]), self._write_group)

    def _write_group(self) -> None:
        group = list(self._entries)
        self._entries.clear()
        if not self.is_gone:
            self._process(group)
        # The thread answers, and only then looks for more.
        assert self._loop is not None
        self._is_writing = False
        self._begin()
