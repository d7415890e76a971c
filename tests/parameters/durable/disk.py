"""A state directory for tests of parameters: no socket, a clock of our own."""

import itertools
from pathlib import Path
from typing import Any, cast

import numpy as np

from gradserve_server.parameters.journal import ParametersJournals, update_ledger_record
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.restoring import restore_parameters
from gradserve_server.parameters.versions import Version
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.directory import StateDirectory
from gradserve_server.storage.journal import Durability
from gradserve_server.storage.store import StateStore
from tests.journals import snapshots_written
from tests.parameters.bench import KEY, ParametersBench
from tests.storage.copies import copy_state


class Disk:
    """A server's parameters, and the state directory that they are in."""

    def __init__(self, path: Path, default: Durability, **limits: Any) -> None:
        self.path = path
        self.failures: list[str] = []
        self._limits = limits
        self._copies: list[Disk] = []
        self._numbers = itertools.count()
        self.store = StateStore(StateDirectory(path))
        self.journals = ParametersJournals(self.store, default)
        self.bench = ParametersBench(journals=self.journals, **limits)

    @classmethod
    async def open(cls, path: Path, default: Durability = Durability.ROUND, **limits: Any) -> "Disk":
        """Opens a directory, as a server does at its start."""
        disk = cls(path, default, **limits)
        try:
            await restore_parameters(disk.journals, disk.bench.registry, np.empty)
        except BaseException:
            disk.store.close()
            raise
        disk.store.start(disk.failures.append)
        return disk

    async def after_crash(self, **limits: Any) -> "Disk":
        """Returns what another server finds if this one is killed now."""
        copy = self.path.with_name(f"{self.path.name}x{next(self._numbers)}")
        copy_state(self.path, copy)
        self._copies.append(await Disk.open(copy, self.journals.default, **self._limits | limits))
        return self._copies[-1]

    async def parameters(self, *args: Any, **kwargs: Any) -> Parameters:
        """Creates parameters, see `ParametersBench.parameters`, and waits until they are durable."""
        made = await self.bench.parameters(*args, **kwargs)
        await self.journals.settle()
        return made

    def found(self, key: ResourceKey = KEY) -> Parameters:
        """Returns existing parameters."""
        return self.bench.registry.get(key)

    def delete(self, key: ResourceKey = KEY) -> bool:
        """Deletes parameters."""
        return self.bench.registry.delete(key)

    async def shortened(self) -> None:
        """Waits for journals that are being shortened."""
        await snapshots_written(self.journals)

    def close(self) -> None:
        """Closes it and the copies made of it."""
        for each in (*self._copies, self):
            each.store.close()


def ledger_of(parameters: Parameters) -> Any:
    """Returns the state of a ledger, but for the order in which its clients were last heard of, and for the time."""
    ledger = parameters.ledger
    record = update_ledger_record(ledger)
    closer = {name: value for name, value in record["closer"].items() if name != "time"}
    del record["time"]
    return {**record, "clients": sorted(record["clients"]), "closer": closer}


def shape_of(parameters: Parameters) -> Any:
    """Returns all that parameters are but for their ledger, down to the last bit."""
    variables = parameters._variables
    states = [
        {
            "slots": {
                slot: {name: array.tobytes() for name, array in arrays.items()} for slot, arrays in state.slots.items()
            },
            "steps": state.component_steps,
            "rounds": state.rounds,
            "optimizer": state.optimizer,
        }
        for state in (variables.state, variables.next_state)
    ]
    versions = [
        (each.step, each.round_number, cast(Version, each).digest, [array.tobytes() for array in each.arrays])
        for each in parameters._versions.history.all_kept
    ]
    return states, versions, parameters.records(0, 1 << 20), parameters.spec, parameters.incarnation
