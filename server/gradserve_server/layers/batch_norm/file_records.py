"""The layers of a state directory: their journals, their restoration and their inspection."""

import asyncio
import base64
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

import ml_dtypes  # noqa: F401  (its dtypes have names from then on)
import numpy as np
from numpy.typing import NDArray

from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.layers.batch_norm.config import BatchNormConfig, RandomAdjustment
from gradserve_server.layers.batch_norm.events import Moments, Record
from gradserve_server.layers.batch_norm.file_journal import FileLayerJournal, ToHost, restore_state
from gradserve_server.layers.batch_norm.forwards import Forwards
from gradserve_server.layers.batch_norm.layer import BatchNormLayer, LayerEnvironment
from gradserve_server.layers.batch_norm.registry import LayerRegistry
from gradserve_server.layers.batch_norm.spec import Implementation
from gradserve_server.layers.batch_norm.state import LayerJournal, LayerRecords, LayerState
from gradserve_server.layers.batch_norm.variables import variable_names
from gradserve_server.layers.initializers import Initializer, NamedInitializer, TensorInitializer
from gradserve_server.layers.regularizers import Regularizer
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.security.identity import owner_named
from gradserve_server.storage.directory import DAMAGES, DamagedError, StateError
from gradserve_server.storage.journal import Durability, NoJournal
from gradserve_server.storage.segments import Allocate
from gradserve_server.storage.store import Change, StateStore

SELECT_LAYERS = "SELECT id, container, name, owner, incarnation, creation_id, config, lifetime FROM layer ORDER BY id"


_ENDLESS = 1 << 62


_PLAIN = (
    *("decay", "center", "scale", "epsilon", "activation_fn", "in_place_updates", "trainable", "fused"),
    *("data_format", "zero_debias_moving_mean", "renorm", "renorm_decay", "renorm_zero_debias"),
)
_TAGS = ("updates_collections", "outputs_collections")

Make: TypeAlias = Callable[[Callable[[bool], object]], BatchNormLayer]


class FileLayerRecords(LayerRecords):
    """The journals of layers in a state directory."""

    def __init__(self, store: StateStore, default: Durability) -> None:
        super().__init__()
        self.default = default
        self._store = store
        self._last_number = max((number for (number,) in store.rows("SELECT id FROM layer")), default=0)
        self._to_host: ToHost = _as_it_is
        self._tasks: set[asyncio.Task[None]] = set()

    def journal(self, key: ResourceKey, config: BatchNormConfig, incarnation: str, creation_id: str) -> LayerJournal:
        """Returns the journal of a new layer, in the state directory unless its durability is NONE."""
        if config.durability is Durability.NONE:
            return LayerJournal(NoJournal())
        self._last_number += 1
        number = self._last_number

        def insert(change: Change, lifetime: Lifetime) -> None:
            assert config.durability is not None, "the registry has chosen one"
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
        """Returns once all changes so far are on disk."""
        await self._store.flush()

    async def finish(self) -> None:
        """Waits for journals that are being shortened."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def restore(
        self, registry: LayerRegistry, environment: LayerEnvironment, allocate: Allocate, to_host: ToHost
    ) -> int:
        """Restores the layers of the state directory; returns how many there are.

        Args:
            registry: Gets the layers.
            environment: What the layers share.
            allocate: Allocates memory for their values.
            to_host: Copies values to host memory; the journals use it from now on.

        Raises:
            DamagedError: Something is damaged.
            ResourceExhaustedError: The limits are too low for the layers of the directory.
        """
        self._to_host = to_host
        rows = self._store.rows(SELECT_LAYERS)
        for number, container, name, owner, *columns in rows:
            key = ResourceKey(container, name, owner_named(owner))
            try:
                self._restore(number, key, columns, partial(registry.restore, key), environment, allocate)
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
        environment: LayerEnvironment,
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

        def make(on_presence: Callable[[bool], object]) -> BatchNormLayer:
            return BatchNormLayer(
                environment,
                key,
                config,
                incarnation=incarnation,
                creation_id=creation_id,
                journal=journal,
                on_presence=on_presence,
            )

        layer = add(lifetime, make)

        def fill(state: LayerState) -> None:
            restore_state(state, self._store.rows, number, tensors.variables, tensors.pending)
            journal.begin_again(state)

        layer.restore(fill)

    def _own(self, background: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(background)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(frozen=True)
class FoundLayer:
    """A layer of a state directory.

    Attributes:
        number: Its number in the directory.
        key: Its name.
        num_variables: The number of its variables.
        num_updates: How often its moving averages were updated.
        num_pending: The number of pending updates.
        damage: The reason why the layer cannot be used, None if it can.
    """

    number: int
    key: ResourceKey
    num_variables: int = 0
    num_updates: int = 0
    num_pending: int = 0
    damage: str | None = None


def inspect_layers(store: StateStore) -> Iterator[FoundLayer]:
    """Reads and checks all layers."""
    for number, container, name, *_, config, lifetime in store.rows(SELECT_LAYERS):
        key = ResourceKey(container, name)
        try:
            yield _inspect_one(store, number, key, config, lifetime)
        except (StateError, *DAMAGES) as error:
            yield FoundLayer(number, key, damage=str(error) or type(error).__name__)


def layer_removal(store: StateStore, found: FoundLayer) -> Change | None:
    """Returns the change that removes a damaged layer; None if it is not damaged."""
    if found.damage is None:
        return None
    change = Change()
    blobs = store.rows(
        "SELECT blob FROM layer_variable WHERE layer = ? UNION SELECT blob FROM layer_update WHERE layer = ?",
        found.number,
        found.number,
    )
    change.execute("DELETE FROM layer WHERE id = ?", found.number)
    change.remove(blob for (blob,) in blobs)
    return change


def _inspect_one(store: StateStore, number: int, key: ResourceKey, config: str, lifetime: str) -> FoundLayer:
    Lifetime(**json.loads(lifetime))
    tensors = read_tensors(store, number, config_of(json.loads(config)), np.empty)
    forwards = Forwards(Budget(_ENDLESS, "bytes"), Budget(_ENDLESS, "tensor handles"), lambda: 0.0, remembered=_ENDLESS)
    state = LayerState(forwards)
    restore_state(state, store.rows, number, tensors.variables, tensors.pending)
    return FoundLayer(number, key, len(tensors.variables), state.num_updates, len(tensors.pending))


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a layer.

    Attributes:
        variables: The variables, by name; empty if they were not created.
        pending: The data of pending updates, by forward.
        variable_blobs: The blobs of the variables.
        pending_blobs: The blobs of the updates.
    """

    variables: Mapping[str, NDArray[Any]]
    pending: Mapping[str, Moments]
    variable_blobs: Mapping[str, int]
    pending_blobs: Mapping[str, int]


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


def config_record(config: BatchNormConfig) -> Record:
    """Returns a configuration in types that JSON has; the reverse of `config_of`."""
    assert config.durability is not None, "the registry has chosen one"
    return {
        **{name: getattr(config, name) for name in (*_PLAIN, *_TAGS)},
        "param_initializers": {name: _initializer_record(each) for name, each in config.param_initializers.items()},
        "param_regularizers": {
            name: [each.name, dict(each.scales)] for name, each in config.param_regularizers.items()
        },
        "variables_collections": dict(config.variables_collections),
        "renorm_clipping": dict(config.renorm_clipping),
        "adjustment": None if config.adjustment is None else asdict(config.adjustment),
        "durability": config.durability.value,
    }


def config_of(record: Record) -> BatchNormConfig:
    """Returns the configuration of a record.

    Raises:
        ServiceError, ValueError, TypeError, KeyError: It is no such record.
    """
    plain: dict[str, Any] = {name: record[name] for name in _PLAIN}
    tags: dict[str, Any] = {name: tuple(record[name]) for name in _TAGS}
    adjustment = record["adjustment"]
    return BatchNormConfig(
        **plain,
        **tags,
        param_initializers={name: _initializer_of(each) for name, each in record["param_initializers"].items()},
        param_regularizers={
            name: Regularizer(kind, scales) for name, (kind, scales) in record["param_regularizers"].items()
        },
        variables_collections={name: tuple(tags) for name, tags in record["variables_collections"].items()},
        renorm_clipping=record["renorm_clipping"],
        adjustment=None
        if adjustment is None
        else RandomAdjustment(tuple(adjustment["scale"]), tuple(adjustment["bias"]), adjustment["seed"]),
        durability=Durability(record["durability"]),
    )


def _initializer_record(initializer: Initializer) -> Record:
    if isinstance(initializer, NamedInitializer):
        return {"name": initializer.name, "parameters": dict(initializer.parameters), "seed": initializer.seed}
    tensor = initializer.tensor
    return {
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "bytes": base64.b64encode(tensor.tobytes()).decode(),
    }


def _initializer_of(record: Record) -> Initializer:
    if "name" in record:
        return NamedInitializer(record["name"], record["parameters"], record["seed"])
    content = base64.b64decode(record["bytes"], validate=True)
    return TensorInitializer(np.frombuffer(content, np.dtype(record["dtype"])).reshape(record["shape"]))


async def _as_it_is(arrays: Any) -> list[NDArray[Any]]:
    return list(arrays)
