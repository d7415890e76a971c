"""Looks at the layers of a state directory that no server uses."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gradserve_server.layers.batch_norm.durable.config_records import config_of
from gradserve_server.layers.batch_norm.durable.records import SELECT_LAYERS, read_tensors
from gradserve_server.layers.batch_norm.durable.state_records import restore_state
from gradserve_server.layers.batch_norm.forwards import Forwards
from gradserve_server.layers.batch_norm.state import LayerState
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.quotas import Quota
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.state.files.errors import DAMAGES, StateError
from gradserve_server.state.files.store import Change, StateStore

_ENDLESS = 1 << 62


@dataclass(frozen=True)
class FoundLayer:
    """A layer of a state directory.

    Attributes:
        number: Its number there.
        key: Its name.
        num_variables: The number of its variables.
        num_updates: How often its moving averages were updated.
        num_pending: The number of updates still to come.
        damage: The reason why the layer cannot be used, None if it can.
    """

    number: int
    key: ResourceKey
    num_variables: int = 0
    num_updates: int = 0
    num_pending: int = 0
    damage: str | None = None


def inspect_layers(store: StateStore) -> Iterator[FoundLayer]:
    """Reads all that there is of layers, and checks it."""
    for number, container, name, *_, config, lifetime in store.rows(SELECT_LAYERS):
        key = ResourceKey(container, name)
        try:
            yield _inspect_one(store, number, key, config, lifetime)
        except (StateError, *DAMAGES) as error:
            yield FoundLayer(number, key, damage=str(error) or type(error).__name__)


def _inspect_one(store: StateStore, number: int, key: ResourceKey, config: str, lifetime: str) -> FoundLayer:
    Lifetime(**json.loads(lifetime))
    tensors = read_tensors(store, number, config_of(json.loads(config)), np.empty)
    forwards = Forwards(Quota(_ENDLESS, "bytes"), Quota(_ENDLESS, "tensor handles"), lambda: 0.0, remembered=_ENDLESS)
    state = LayerState(forwards)
    restore_state(state, store.rows, number, tensors.variables, tensors.pending)
    return FoundLayer(number, key, len(tensors.variables), state.num_updates, len(tensors.pending))


def layer_removal(store: StateStore, found: FoundLayer) -> Change | None:
    """Returns what removes a layer that is damaged; None if it is not."""
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
