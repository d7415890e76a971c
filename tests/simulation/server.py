"""One server on a simulated disk: the real accumulators, journals and store, without sockets and threads."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradserve_server.accumulators.durable import records as records_module
from gradserve_server.accumulators.durable.records import FileRecords
from gradserve_server.state.durability import Durability
from gradserve_server.state.files import segments as segments_module
from gradserve_server.state.files import store as store_module
from gradserve_server.state.files.directory import StateDirectory
from gradserve_server.state.files.segments import Segments, whole_blocks
from gradserve_server.state.files.store import StateStore
from tests.accumulators.bench import Bench
from tests.simulation.disk import SEGMENT_BYTES, SimulatedDatabase, SimulatedDisk

ID_WINDOW = 5
MOST_EVENTS = 12
"""Events after which a journal is shortened: few, so that it happens."""


def _name_of(there: Mapping[str, bool]) -> str:
    return " and ".join(name for name, is_there in there.items() if is_there) or "quiet"


STATES = [
    _name_of(dict(zip(("gradients", "waiters", "writes"), there, strict=True)))
    for there in itertools.product((False, True), repeat=3)
]
"""What there is in the middle of a fault, in any combination."""


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


class Server:
    """A server from its start to its crash.

    Attributes:
        disk: What it writes on.
        bench: Its accumulators.
        store: Its state.
        failure: Why it has to stop; None while it can go on.
    """

    def __init__(self, path: Path, chance: random.Random, patched: contextlib.ExitStack) -> None:
        self.disk = SimulatedDisk(path, chance)
        self.failure: str | None = None
        _replace(patched, segments_module, "os", self.disk)
        _replace(patched, store_module, "Segments", lambda folder: Segments(folder, SEGMENT_BYTES))
        _replace(patched, records_module, "_MOST_EVENTS", MOST_EVENTS)
        self.store = SimulatedStore(StateDirectory(path), self.disk, chance)
        self.records = FileRecords(self.store, Durability.ROUND)
        self.bench = Bench(records=self.records, id_window=ID_WINDOW, undelivered_lease_seconds=1e6)
        self.bench.registry._new_incarnation = lambda: f"{chance.getrandbits(64):x}"

    @property
    def state(self) -> str:
        """What the server is in the middle of: one of `STATES`."""
        registry = self.bench.registry
        there = {
            "gradients": any(each.num_accumulated for _, each in registry.page("test", "", 100)),
            "waiters": bool(registry.waiters.used),
            "writes": not self.store.is_idle,
        }
        return _name_of(there)

    async def restore(self) -> None:
        """Makes again what is on disk, as a server does at its start."""
        await self.records.restore(self.bench.registry, np.empty)

    def start(self) -> None:
        """Begins to write."""
        self.store.start(self._fail)

    def _fail(self, reason: str) -> None:
        self.failure = reason

    def check_files(self) -> None:
        """Checks the accounts of the files: every blob is referred to, and every block is free or in use, once."""
        store = self.store
        rows = store.rows("SELECT blob FROM gradient UNION ALL SELECT blob FROM average")
        referred = sorted(blob for (blob,) in rows)
        stored = sorted(number for (number,) in store.rows("SELECT id FROM blob"))
        assert referred == stored == sorted(store.blobs), f"blobs {stored} are there, but {referred} are referred to"
        used = sum(whole_blocks(each.num_bytes) for blob in store._blobs.values() for each in blob.extents)
        reserved = sum(
            each.num_bytes
            for journal in self.records._journals.values()
            if journal._space is not None
            for each in journal._space.extents
        )
        free, there = store._segments.num_free, store._segments.num_bytes
        assert free + used + reserved == there, f"of {there} bytes {used} are used, {reserved} reserved, {free} free"

    def check_accounts(self, accumulators: Sequence[Any]) -> None:
        """Checks that the memory in use is that of the accumulators."""
        expected = sum(each.state.num_bytes for each in accumulators)
        used = self.bench.memory.used
        assert used == expected, f"the accumulators have {expected} bytes, {used} are counted"


def _replace(patched: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    patched.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
