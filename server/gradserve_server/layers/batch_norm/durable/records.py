"""The layers of a state directory."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

from numpy.typing import NDArray

from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.layers.batch_norm.durable.config_records import config_of, config_record
from gradserve_server.layers.batch_norm.durable.journal import FileLayerJournal, ToHost
from gradserve_server.layers.batch_norm.durable.state_records import restore_state
from gradserve_server.layers.batch_norm.implementation import Implementation
from gradserve_server.layers.batch_norm.journal import LayerJournal, MemoryLayerJournal
from gradserve_server.layers.batch_norm.kind import BatchNormKind
from gradserve_server.layers.batch_norm.layer import BatchNormLayer
from gradserve_server.layers.batch_norm.saved import Moments
from gradserve_server.layers.batch_norm.state import LayerState
from gradserve_server.layers.batch_norm.variables import variable_names
from gradserve_server.layers.registry import LayerRegistry
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.security.identity import owner_named
from gradserve_server.state.durability import Durability
from gradserve_server.state.files.errors import DAMAGES, DamagedError
from gradserve_server.state.files.store import Change, StateStore
from gradserve_server.state.files.values import Allocate
from gradserve_server.state.journal import NoJournal

SELECT_LAYERS = "SELECT id, container, name, owner, incarnation, creation_id, config, lifetime FROM layer ORDER BY id"

Make: TypeAlias = Callable[[Callable[[bool], object]], BatchNormLayer]
Layers: TypeAlias = LayerRegistry[BatchNormConfig, BatchNormLayer]


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a layer.

    Attributes:
        variables: The variables, by name; none if they were not created.
        pending: What pending updates need, by forward.
        variable_blobs: Where the variables are.
        pending_blobs: Where the updates are.
    """

    variables: Mapping[str, NDArray[Any]]
    pending: Mapping[str, Moments]
    variable_blobs: Mapping[str, int]
    pending_blobs: Mapping[str, int]


class FileLayerRecords:
    """The journals of layers in a state directory."""

    def __init__(self, store: StateStore, default: Durability) -> None:
        """Takes the state directory, and the durability of layers that ask for none."""
        self.default = default
        self._store = store
        self._last_number = max((number for (number,) in store.rows("SELECT id FROM layer")), default=0)
        self._to_host: ToHost = _as_it_is
        self._tasks: set[asyncio.Task[None]] = set()

    def journal(self, key: ResourceKey, config: BatchNormConfig, incarnation: str, creation_id: str) -> LayerJournal:
        """See `LayerRecords`."""
        if config.durability is Durability.NONE:
            return MemoryLayerJournal(NoJournal())
        self._last_number += 1
        number = self._last_number

        def insert(change: Change, lifetime: Lifetime) -> None:
            assert config.durability is not None, "the kind has chosen one"
            change.execute(
                "INSERT INTO layer "
                "(id, container, name, owner, incarnation, creation_id, durability, config, lifetime) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                *(number, key.container, key.name, key.user.name),
                *(incarnation, creation_id, config.durability.value),
                json.dumps(config_record(config)),
                json.dumps(asdict(lifetime)),
            )

        return FileLayerJournal(self._store, number, self._to_host, self._own, insert)

    async def settle(self) -> None:
        """See `LayerRecords`."""
        await self._store.flush()

    async def finish(self) -> None:
        """Waits for journals that are being shortened."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def restore(self, registry: Layers, kind: BatchNormKind, allocate: Allocate, to_host: ToHost) -> int:
        """Makes the layers again that are in the state directory; returns how many there are.

        Args:
            registry: Gets the layers.
            kind: Makes them.
            allocate: Allocates memory for their values.
            to_host: Brings values to the host's memory, from now on.

        Raises:
            DamagedError: Something is damaged.
            ResourceExhaustedError: Less is allowed than what is there.
        """
        self._to_host = to_host
        rows = self._store.rows(SELECT_LAYERS)
        for number, container, name, owner, *columns in rows:
            key = ResourceKey(container, name, owner_named(owner))
            try:
                self._restore(number, key, columns, partial(registry.restore, key), kind, allocate)
            except ResourceExhaustedError:
                raise
            except DAMAGES as error:
                raise DamagedError(
                    f"{self._store.path}: the record of layer {str(key)!r} cannot be used: {error}: restore the "
                    f"directory from a backup, or see what `gradserve state repair {self._store.path}` would remove"
                ) from error
        return len(rows)

    def _restore(
        self,
        number: int,
        key: ResourceKey,
        columns: Sequence[str],
        add: Callable[[Lifetime, Make], BatchNormLayer],
        kind: BatchNormKind,
        allocate: Allocate,
    ) -> None:
        incarnation, creation_id, config_text, lifetime_text = columns
        config, lifetime = config_of(json.loads(config_text)), Lifetime(**json.loads(lifetime_text))
        tensors = read_tensors(self._store, number, config, allocate)
        latest = "SELECT max(position) FROM (SELECT position FROM layer_event WHERE layer = ? UNION ALL "
        ((position,),) = self._store.rows(f"{latest}SELECT position FROM layer_state WHERE layer = ?)", number, number)
        journal = FileLayerJournal(
            self._store,
            number,
            self._to_host,
            self._own,
            position=position or 0,
            variables=tensors.variable_blobs,
            pending=tensors.pending_blobs,
        )
        layer = add(lifetime, partial(kind.make_again, key, config, incarnation, creation_id, journal))

        def fill(state: LayerState) -> None:
            restore_state(state, self._store.rows, number, tensors.variables, tensors.pending)
            journal.begin_again(state)

        layer.restore(fill)

    def _own(self, background: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(background)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def read_tensors(store: StateStore, number: int, config: BatchNormConfig, allocate: Allocate) -> StoredTensors:
    """Returns the tensors of a layer.

    Raises:
        DamagedError: Their values are damaged.
        ValueError, TypeError, KeyError, IndexError: Their records are.
    """
    rows = store.rows("SELECT name, place, blob FROM layer_variable WHERE layer = ?", number)
    blobs = {blob: store.read(blob, allocate) for blob in {blob for *_, blob in rows}}
    variables = {name: blobs[blob][place] for name, place, blob in rows}
    if variables and variables.keys() != set(variable_names(config)):
        raise ValueError(f"expected the variables {', '.join(variable_names(config))}, got {', '.join(variables)}")
    pending, pending_blobs = {}, {}
    for forward_id, implementation, blob in store.rows(
        "SELECT forward, implementation, blob FROM layer_update WHERE layer = ?", number
    ):
        mean, variance = store.read(blob, allocate)
        pending[forward_id] = Moments(mean, variance, Implementation[implementation])
        pending_blobs[forward_id] = blob
    return StoredTensors(variables, pending, {name: blob for name, _, blob in rows}, pending_blobs)


async def _as_it_is(arrays: Any) -> list[NDArray[Any]]:
    return list(arrays)
