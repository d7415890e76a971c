"""Looks at the accumulators of a state directory that no server uses."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradserve_server.accumulators.durable.records import DAMAGES, read_ledger
from gradserve_server.accumulators.durable.spec_records import average_of, joined, spec_of
from gradserve_server.accumulators.gradient import Average, Value
from gradserve_server.accumulators.identity import CallMemory
from gradserve_server.accumulators.ledger import Answer
from gradserve_server.resources import ResourceKey
from gradserve_server.state.files.errors import StateError
from gradserve_server.state.files.store import Change, StateStore
from gradserve_server.tensors.quotas import Quota

_ENDLESS = 1 << 62


@dataclass(frozen=True)
class Found:
    """An accumulator of a state directory.

    Attributes:
        number: Its number there.
        key: Its name.
        durability: Its durability.
        step: Its global_step; None if that cannot be read.
        num_gradients: The gradients of its current round.
        averages: The rounds whose averages can be read.
        damaged_averages: The rounds whose averages cannot be read, each with the reason.
        damage: The reason why the accumulator cannot be used, None if it can.
    """

    number: int
    key: ResourceKey
    durability: str
    step: int | None
    num_gradients: int
    averages: tuple[int, ...]
    damaged_averages: Mapping[int, str]
    damage: str | None


def inspect(store: StateStore) -> Iterator[Found]:
    """Reads all that there is, and checks it."""
    for number, *columns in store.rows(
        "SELECT id, container, name, durability, spec FROM accumulator ORDER BY container, name"
    ):
        yield _inspect_one(store, number, *columns)


def _inspect_one(store: StateStore, number: int, container: str, name: str, durability: str, spec: str) -> Found:
    averages, damaged = [], {}
    rounds = store.rows("SELECT round FROM average WHERE accumulator = ? ORDER BY round", number)
    for (round_number,) in rounds:
        try:
            read_average(store, number, round_number)
        except (StateError, *DAMAGES) as error:
            damaged[round_number] = str(error)
        else:
            averages.append(round_number)
    step, num_gradients, damage = None, 0, None
    try:
        spec_of(json.loads(spec))
        ledger, _ = read_ledger(store.rows, number, unlimited_calls())
        step, num_gradients = ledger.rounds.global_step, ledger.rounds.num_accumulated
        gradients = store.rows("SELECT names, blob FROM gradient WHERE accumulator = ?", number)
        for names, blob in gradients:
            joined(json.loads(names), store.read(blob, np.empty))
        for names, blob in store.rows("SELECT names, blob FROM part WHERE accumulator = ?", number):
            joined(json.loads(names), store.read(blob, np.empty))
        if len(gradients) != num_gradients:
            damage = f"{len(gradients)} of the {num_gradients} gradients of its current round are there"
    except (StateError, *DAMAGES) as error:
        damage = str(error)
    key = ResourceKey(container, name)
    return Found(number, key, durability, step, num_gradients, tuple(averages), damaged, damage)


def read_average(store: StateStore, number: int, round_number: int | None = None) -> Average:
    """Returns the average of a round of an accumulator; the newest one for None.

    Raises:
        StateError: There is none, or it is damaged.
    """
    rows = store.rows(
        "SELECT record, names, blob FROM average WHERE accumulator = ? AND round = coalesce(?, round) "
        "ORDER BY round DESC LIMIT 1",
        number,
        round_number,
    )
    if not rows:
        raise StateError("there is no average")
    record, names, blob = rows[0]
    values: dict[str, Value] = joined(json.loads(names), store.read(blob, np.empty))
    return average_of(json.loads(record), values)[0]


def average_bytes(store: StateStore, number: int) -> int:
    """Returns the size of the newest average of an accumulator; 0 if there is none that can be read."""
    rows = store.rows("SELECT blob FROM average WHERE accumulator = ? ORDER BY round DESC LIMIT 1", number)
    return store.size_of(rows[0][0]) if rows else 0


def removal(store: StateStore, found: Found) -> Change | None:
    """Returns what removes the damaged parts of an accumulator, or all of it if it cannot be used without them."""
    change = Change()
    if found.damage is not None:
        blobs = store.rows(
            "SELECT blob FROM average WHERE accumulator = ?1 UNION SELECT blob FROM gradient WHERE accumulator = ?1 "
            "UNION SELECT blob FROM part WHERE accumulator = ?1",
            found.number,
        )
        change.execute("DELETE FROM accumulator WHERE id = ?", found.number)
    elif found.damaged_averages:
        blobs = []
        for round_number in found.damaged_averages:
            where: tuple[Any, ...] = (found.number, round_number)
            blobs += store.rows("SELECT blob FROM average WHERE accumulator = ? AND round = ?", *where)
            change.execute("DELETE FROM average WHERE accumulator = ? AND round = ?", *where)
    else:
        return None
    change.remove(blob for (blob,) in blobs)
    return change


def unlimited_calls() -> CallMemory[Answer]:
    """Returns an empty memory of calls that forgets none, to read a ledger with."""
    return CallMemory(
        window=_ENDLESS,
        max_clients=_ENDLESS,
        silence=float("inf"),
        clock=lambda: 0.0,
        bookkeeping=Quota(_ENDLESS, "bytes"),
    )
