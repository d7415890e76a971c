"""A state directory for tests of layers: no socket, a clock of our own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradserve_server.layers.batch_norm.journal import LayerJournals
from gradserve_server.layers.batch_norm.layer import BatchNormLayer
from gradserve_server.layers.batch_norm.restoring import restore_layers
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.directory import StateDirectory
from gradserve_server.storage.journal import Durability
from gradserve_server.storage.store import StateStore
from tests.layers.bench import KEY, LayerBench
from tests.storage.copies import copy_state


async def _on_host(arrays: Sequence[Any]) -> list[Any]:
    return list(arrays)


class LayerDisk:
    """A server's layers, and the state directory that they are in."""

    def __init__(self, path: Path, default: Durability, **limits: Any) -> None:
        self.path = path
        self.failures: list[str] = []
        self.limits = limits
        self.store = StateStore(StateDirectory(path))
        self.journals = LayerJournals(self.store, default)
        self.bench = LayerBench(journals=self.journals, **limits)

    @classmethod
    async def open(cls, path: Path, default: Durability = Durability.ROUND, **limits: Any) -> "LayerDisk":
        """Opens a directory, as a server does at its start."""
        disk = cls(path, default, **limits)
        try:
            restore_layers(disk.journals, disk.bench.registry, disk.bench.environment, np.empty, _on_host)
        except BaseException:
            disk.store.close()
            raise
        disk.store.start(disk.failures.append)
        return disk

    async def after_crash(self) -> "LayerDisk":
        """Returns what another server finds if this one is killed now."""
        copy = self.path.with_name(self.path.name + "x")
        copy_state(self.path, copy)
        return await LayerDisk.open(copy, self.journals.default, **self.limits)

    async def create(self, key: ResourceKey = KEY, **arguments: Any) -> BatchNormLayer:
        layer = self.bench.layer(key, **arguments)
        await self.journals.settle()
        return layer

    def found(self, key: ResourceKey = KEY) -> BatchNormLayer:
        return self.bench.registry.get(key)
