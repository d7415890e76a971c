"""A state directory for tests of accumulators: no socket, a clock of our own."""

from pathlib import Path
from typing import Any

import numpy as np

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.durable.restoring import restore_accumulators
from gradserve_server.accumulators.journal import AccumulatorJournals
from gradserve_server.accumulators.records import ledger_record
from gradserve_server.accumulators.spec import ComponentSpec
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.directory import StateDirectory
from gradserve_server.storage.journal import Durability
from gradserve_server.storage.store import StateStore
from tests.accumulators.bench import KEY, Bench
from tests.journals import snapshots_written
from tests.storage.copies import copy_state


class Disk:
    """A server's accumulators, and the state directory that they are in."""

    def __init__(self, path: Path, default: Durability = Durability.ROUND, **limits: Any) -> None:
        self.path = path
        self.failures: list[str] = []
        self._limits = limits
        self.store = StateStore(StateDirectory(path))
        self.journals = AccumulatorJournals(self.store, default)
        self.bench = Bench(journals=self.journals, **limits)

    @classmethod
    async def open(cls, path: Path, default: Durability = Durability.ROUND, **limits: Any) -> "Disk":
        """Opens a directory, as a server does at its start."""
        disk = cls(path, default, **limits)
        try:
            await restore_accumulators(disk.journals, disk.bench.registry, np.empty)
        except BaseException:
            disk.store.close()
            raise
        disk.store.start(disk.failures.append)
        return disk

    async def after_crash(self) -> "Disk":
        """Returns what another server finds if this one is killed now."""
        copy = self.path.with_name(self.path.name + "x")
        copy_state(self.path, copy)
        return await Disk.open(copy, self.journals.default, **self._limits)

    async def create(self, *components: ComponentSpec, key: ResourceKey = KEY, **spec: Any) -> Accumulator:
        accumulator = self.bench.accumulator(*components, key=key, **spec)
        await self.journals.settle()
        return accumulator

    def found(self, key: ResourceKey = KEY) -> Accumulator:
        return self.bench.registry.get(key)

    async def shortened(self) -> None:
        """Waits for journals that are being shortened."""
        await snapshots_written(self.journals)


def ledger_of(accumulator: Accumulator) -> Any:
    """Returns the state of a ledger, but for the order in which its clients were last heard of."""
    record = ledger_record(accumulator._ledger)
    return {**record, "clients": sorted(record["clients"])}
