"""Accumulators of a state directory as values, which another state directory takes over.

No server uses either directory meanwhile. A digest tells whether both have the same.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeAlias

import numpy as np

from gradserve_server.state.files.errors import StateError
from gradserve_server.state.files.store import Change, StateStore
from gradserve_server.state.files.values import Array

Key: TypeAlias = tuple[str, str]
"""The container and the name of an accumulator."""

_COLUMNS = ("container", "name", "owner", "incarnation", "durability", "spec", "lifetime")


@dataclass(frozen=True)
class StoredValues:
    """A gradient or an average.

    Attributes:
        place: The position of the gradient, or the number of the average's round.
        record: What is known of it, as JSON.
        names: Which array is which component, as JSON.
        arrays: The values.
    """

    place: int
    record: str
    names: str
    arrays: Sequence[Array]


@dataclass(frozen=True)
class MovableAccumulator:
    """All that a state directory has of an accumulator.

    Attributes:
        columns: Its row: the names of `_COLUMNS` in their order.
        ledger: What the events up to a position have led to: the position, and the record; None before there is one.
        events: The later events, with their positions.
        gradients: The gradients of the current round.
        averages: The averages that can be read.
    """

    columns: tuple[str, ...]
    ledger: tuple[int, str] | None
    events: tuple[tuple[int, str], ...]
    gradients: tuple[StoredValues, ...]
    averages: tuple[StoredValues, ...]

    @property
    def key(self) -> Key:
        """Its container and name."""
        return self.columns[0], self.columns[1]

    @property
    def digest(self) -> str:
        """SHA-256 of everything, in hexadecimal digits."""
        found = sha256(json.dumps([self.columns, self.ledger, self.events]).encode())
        for kind, values in (("gradients", self.gradients), ("averages", self.averages)):
            found.update(json.dumps([kind, len(values)]).encode())
            for each in values:
                specs = [[array.dtype.name, array.shape] for array in each.arrays]
                found.update(json.dumps([each.place, each.record, each.names, specs]).encode())
                for array in each.arrays:
                    found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return found.hexdigest()


def keys_of(store: StateStore) -> Mapping[Key, int]:
    """Returns the accumulators of a state directory, and their numbers there."""
    rows = store.rows("SELECT container, name, id FROM accumulator ORDER BY container, name")
    return {(container, name): number for container, name, number in rows}


def read_movable(store: StateStore, key: Key) -> MovableAccumulator:
    """Reads an accumulator, and verifies its values.

    Raises:
        StateError: It is not there, or damaged.
    """
    rows = store.rows(
        f"SELECT id, {', '.join(_COLUMNS)} FROM accumulator WHERE container = ? AND name = ?",
        *key,
    )
    if not rows:
        raise StateError(f"{store.path}: there is no accumulator '{'/'.join(key)}'")
    number, *columns = rows[0]
    ledger = store.rows("SELECT position, record FROM ledger WHERE accumulator = ?", number)
    events = store.rows("SELECT position, record FROM event WHERE accumulator = ? ORDER BY position", number)
    gradients = store.rows(
        "SELECT position, contribution, names, blob FROM gradient WHERE accumulator = ? ORDER BY position", number
    )
    averages = store.rows("SELECT round, record, names, blob FROM average WHERE accumulator = ? ORDER BY round", number)
    return MovableAccumulator(
        columns=tuple(columns),
        ledger=ledger[0] if ledger else None,
        events=tuple(events),
        gradients=tuple(_values(store, *row) for row in gradients),
        averages=tuple(_values(store, *row) for row in averages),
    )


def addition(store: StateStore, moved: MovableAccumulator) -> Change:
    """Returns what adds an accumulator to a state directory."""
    (last,) = store.rows("SELECT coalesce(max(id), 0) FROM accumulator")[0]
    number = last + 1
    change = Change()
    change.execute(
        f"INSERT INTO accumulator (id, {', '.join(_COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        number,
        *moved.columns,
    )
    if moved.ledger is not None:
        change.execute("INSERT INTO ledger (accumulator, position, record) VALUES (?, ?, ?)", number, *moved.ledger)
    for event in moved.events:
        change.execute("INSERT INTO event (accumulator, position, record) VALUES (?, ?, ?)", number, *event)
    for statement, values in (
        ("INSERT INTO gradient (accumulator, position, contribution, names, blob) VALUES (?, ?, ?, ?, ?)", "gradients"),
        ("INSERT INTO average (accumulator, round, record, names, blob) VALUES (?, ?, ?, ?, ?)", "averages"),
    ):
        each: StoredValues
        for each in getattr(moved, values):
            blob = store.new_blob()
            change.put(blob, each.arrays)
            change.execute(statement, number, each.place, each.record, each.names, blob)
    return change


def removal_of(store: StateStore, keys: Sequence[Key]) -> Change:
    """Returns what removes accumulators from a state directory, as far as they are there."""
    change = Change()
    numbers = keys_of(store)
    for key in keys:
        if (number := numbers.get(key)) is None:
            continue
        blobs = store.rows(
            "SELECT blob FROM average WHERE accumulator = ? UNION SELECT blob FROM gradient WHERE accumulator = ?",
            number,
            number,
        )
        change.execute("DELETE FROM accumulator WHERE id = ?", number)
        change.remove(blob for (blob,) in blobs)
    return change


def _values(store: StateStore, place: int, record: str, names: str, blob: int) -> StoredValues:
    return StoredValues(place, record, names, store.read(blob, np.empty))
