"""Restores the parameters of a state directory when a server starts."""

import json
from collections.abc import Sequence
from typing import Any

from gradserve_server.accumulators.gradient import Average, Gradient
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.records import average_of, contribution_of, joined
from gradserve_server.errors import InvalidArgumentError, ResourceExhaustedError
from gradserve_server.parameters.journal import (
    PARAMETERS,
    ParametersJournal,
    ParametersJournals,
    parameters_spec_of,
    round_record_of,
    state_of,
)
from gradserve_server.parameters.ledger import UpdateLedger
from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.record import RoundRecord
from gradserve_server.parameters.registry import ParametersRegistry
from gradserve_server.parameters.variables import OptimizerState
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.cluster import MisplacedError
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.security.identity import owner_named
from gradserve_server.storage.directory import DAMAGES, StateError
from gradserve_server.storage.segments import Allocate
from gradserve_server.storage.store import StateStore

_ENDLESS = 1 << 62
SELECT_PARAMETERS = "SELECT id, container, name, owner, incarnation, spec, lifetime FROM parameters ORDER BY id"


async def restore_parameters(journals: ParametersJournals, registry: ParametersRegistry, allocate: Allocate) -> int:
    """Restores all parameters of a state directory; returns their number.

    Args:
        journals: The journals of the state directory.
        registry: Gets the parameters.
        allocate: Allocates memory for their values.

    Raises:
        DamagedError: Something is damaged.
        StateError: Parameters belong to another server.
        ResourceExhaustedError: They exceed the limits of the server.
    """
    store = journals.store
    journals.new_calls = lambda: registry.factory.new_call_memory(Budget(_ENDLESS, "bytes").reserve())
    rows = store.rows(SELECT_PARAMETERS)
    for row in rows:
        key = ResourceKey(row[1], row[2], owner_named(row[3]))
        try:
            await _restore(journals, registry, allocate, key, row)
        except ResourceExhaustedError:
            raise
        except MisplacedError as error:
            raise StateError(
                f"{store.path}: {error}; the directory is whole: start each server on its own directory"
            ) from error
        except (*DAMAGES, InvalidArgumentError) as error:
            raise journals.damaged(key, error) from error
    return len(rows)


async def _restore(
    journals: ParametersJournals,
    registry: ParametersRegistry,
    allocate: Allocate,
    key: ResourceKey,
    row: Sequence[Any],
) -> Parameters:
    store, number, incarnation = journals.store, row[0], row[4]
    spec, lifetime = parameters_spec_of(json.loads(row[5])), Lifetime(**json.loads(row[6]))
    durability = spec.durability
    if durability is None:
        raise ValueError("they have no durability")
    state, state_blob = _state(store, number, allocate)

    def fill(ledger: UpdateLedger) -> ParametersJournal:
        position = PARAMETERS.replay(store.rows, number, ledger)
        return journals.begin_again(key, number, durability, position, state_blob)

    made = await registry.restore(
        key, spec, lifetime, incarnation, fill, _versions(store, number, allocate), state, _records(store, number)
    )
    updates = store.rows(
        "SELECT contribution, names, blob FROM parameters_update WHERE parameters = ? ORDER BY position", number
    )
    for record, names, blob in updates:
        values = joined(json.loads(names), store.read(blob, allocate))
        gradient = Gradient(values, owned=True, finite=frozenset(values))
        await made.add_again(gradient, contribution_of(json.loads(record)))
    if len(updates) != made.rounds.num_accumulated:
        raise ValueError(f"expected {made.rounds.num_accumulated} updates of the current round, got {len(updates)}")
    made.go_on()
    return made


def _state(store: StateStore, number: int, allocate: Allocate) -> tuple[OptimizerState, int]:
    rows = store.rows("SELECT record, blob FROM parameters_state WHERE parameters = ?", number)
    if not rows:
        raise ValueError("the state of the optimizer is missing")
    ((record, blob),) = rows
    return state_of(json.loads(record), store.read(blob, allocate)), int(blob)


def _versions(store: StateStore, number: int, allocate: Allocate) -> list[tuple[Average, list[RequestId]]]:
    rows = store.rows("SELECT record, names, blob FROM parameters_version WHERE parameters = ? ORDER BY round", number)
    if not rows:
        raise ValueError("there is no version")
    return [
        average_of(json.loads(record), joined(json.loads(names), store.read(blob, allocate)))
        for record, names, blob in rows
    ]


def _records(store: StateStore, number: int) -> list[RoundRecord]:
    rows = store.rows("SELECT record FROM parameters_round WHERE parameters = ? ORDER BY step", number)
    return [round_record_of(json.loads(record)) for (record,) in rows]
