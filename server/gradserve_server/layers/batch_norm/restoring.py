"""Restores the layers of a state directory when a server starts; inspects and repairs them without one."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.layers.batch_norm.events import Moments
from gradserve_server.layers.batch_norm.forwards import Forwards
from gradserve_server.layers.batch_norm.journal import LayerJournal, LayerJournals, ToHost
from gradserve_server.layers.batch_norm.layer import LayerEnvironment
from gradserve_server.layers.batch_norm.records import LAYERS, NOTHING, config_of, state_record
from gradserve_server.layers.batch_norm.registry import LayerRegistry
from gradserve_server.layers.batch_norm.spec import Implementation
from gradserve_server.layers.batch_norm.state import LayerState
from gradserve_server.layers.batch_norm.variables import variable_names, variables_of
from gradserve_server.resources.budget import UNLIMITED, Budget
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.memory import Memory
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.security.identity import owner_named
from gradserve_server.storage.directory import DAMAGES, StateError
from gradserve_server.storage.segments import Allocate
from gradserve_server.storage.store import Change, StateStore

SELECT_LAYERS = "SELECT id, container, name, owner, incarnation, creation_id, config, lifetime FROM layer ORDER BY id"


def restore_layers(
    journals: LayerJournals, registry: LayerRegistry, environment: LayerEnvironment, allocate: Allocate, to_host: ToHost
) -> int:
    """Restores the layers of a state directory; returns how many there are.

    Args:
        journals: The journals of the state directory.
        registry: Gets the layers.
        environment: What the layers share.
        allocate: Allocates memory for their values.
        to_host: Copies values to host memory; the journals use it from now on.

    Raises:
        DamagedError: Something is damaged.
        ResourceExhaustedError: The limits are too low for the layers of the directory.
    """
    journals.to_host = to_host
    journals.new_state = lambda: _state_without_values(environment.remembered)
    rows = journals.store.rows(SELECT_LAYERS)
    for number, container, name, owner, *columns in rows:
        key = ResourceKey(container, name, owner_named(owner))
        try:
            _restore(journals, number, key, columns, registry, allocate)
        except ResourceExhaustedError:
            raise
        except DAMAGES as error:
            raise journals.damaged(key, error) from error
    return len(rows)


def _restore(
    journals: LayerJournals,
    number: int,
    key: ResourceKey,
    columns: Sequence[str],
    registry: LayerRegistry,
    allocate: Allocate,
) -> None:
    store = journals.store
    incarnation, creation_id, config_text, lifetime_text = columns
    config, lifetime = config_of(json.loads(config_text)), Lifetime(**json.loads(lifetime_text))
    tensors = read_tensors(store, number, config, allocate)
    journal = LayerJournal(journals, number, None, variables=tensors.variable_blobs, pending=tensors.pending_blobs)
    layer = registry.restore(key, config, lifetime, incarnation=incarnation, creation_id=creation_id, journal=journal)

    def fill(state: LayerState) -> None:
        journal.position = restore_state(store, number, state, tensors)
        if journal.position:
            # The state has lost forwards, so it may no longer follow from the events.
            record = json.dumps(state_record(state))
            store.add(journals.snapshot(number, journal.position, record))

    layer.restore(fill)


def _state_without_values(remembered: int) -> LayerState:
    """Returns an empty state of a layer with variables, which uses no budget of a server."""
    memory, handles = Memory(Budget(UNLIMITED, "bytes")), Budget(UNLIMITED, "tensor handles")
    state = LayerState(Forwards(memory, handles, lambda: 0.0, remembered=remembered))
    state.variables = variables_of(dict.fromkeys(("moving_mean", "moving_variance"), NOTHING))
    return state


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
    state = _state_without_values(UNLIMITED)
    restore_state(store, number, state, tensors)
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


def restore_state(store: StateStore, number: int, state: LayerState, tensors: StoredTensors) -> int:
    """Restores the state from before a restart into an empty one, without the data for backwards.

    Returns:
        The position of the latest event.

    Raises:
        StateError, DAMAGES: A record is damaged.
    """
    state.variables = variables_of(tensors.variables) if tensors.variables else None
    position = LAYERS.replay(store.rows, number, state)
    state.variables = variables_of(tensors.variables) if tensors.variables else None  # the events carry no values
    state.forwards.lose_saved(tensors.pending)
    return position
