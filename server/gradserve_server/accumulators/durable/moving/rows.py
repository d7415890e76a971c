"""Accumulators of a state directory as values, with a digest that tells whether two are the same."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np

from gradserve_server.accumulators.durable.records import INCOMING
from gradserve_server.state.files.errors import StateError
from gradserve_server.state.files.store import Change, StateStore
from gradserve_server.state.files.values import Array

Key: TypeAlias = tuple[str, str]
"""The container and the name of an accumulator."""

_COLUMNS = ("container", "name", "owner", "incarnation", "durability", "spec", "lifetime")
_INCARNATION, _SPEC = 3, 5


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
    """All that a state directory has of an accumulator, but for gradients that are held for a sharded one.

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
    def incarnation(self) -> str:
        """Its incarnation."""
        return self.columns[_INCARNATION]

    @property
    def spec(self) -> str:
        """Its specification, as JSON."""
        return self.columns[_SPEC]

    def with_spec(self, spec: str) -> "MovableAccumulator":
        """Returns the same with another specification."""
        return replace(self, columns=_replaced(self.columns, _SPEC, spec))

    def elsewhere(self) -> "MovableAccumulator":
        """Returns what a server has of a sharded accumulator that is not its home: there is all that is decided."""
        return MovableAccumulator(self.columns, None, (), (), ())

    @property
    def digest(self) -> str:
        """SHA-256 of everything, in hexadecimal digits; not of the servers over which it is sharded."""
        columns = _replaced(self.columns, _SPEC, json.dumps(_anywhere(self.spec)))
        found = sha256(json.dumps([columns, self.ledger, self.events]).encode())
        for kind, values in (("gradients", self.gradients), ("averages", self.averages)):
            found.update(json.dumps([kind, len(values)]).encode())
            for each in values:
                specs = [[array.dtype.name, array.shape] for array in each.arrays]
                found.update(json.dumps([each.place, each.record, each.names, specs]).encode())
                for array in each.arrays:
                    found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return found.hexdigest()


def keys_of(store: StateStore, *, incoming: bool = False) -> Mapping[Key, int]:
    """Returns the accumulators of a state directory, or those that have come, and their numbers there."""
    rows = store.rows("SELECT container, name, id FROM accumulator ORDER BY container, name")
    if incoming:
        return {tuple(json.loads(name)): number for container, name, number in rows if container == INCOMING}
    return {(container, name): number for container, name, number in rows if container != INCOMING}


def number_of(store: StateStore, key: Key, *, incoming: bool = False) -> int:
    """Returns the number of an accumulator in a state directory.

    Raises:
        StateError: It is not there.
    """
    number = keys_of(store, incoming=incoming).get(key)
    if number is None:
        raise StateError(f"{store.path}: there is no accumulator '{'/'.join(key)}'")
    return number


def read_movable(store: StateStore, key: Key, *, incoming: bool = False) -> MovableAccumulator:
    """Reads an accumulator, or one that has come, and verifies its values.

    Raises:
        StateError: It is not there, or damaged.
    """
    number = number_of(store, key, incoming=incoming)
    ((_, _, *columns),) = store.rows(f"SELECT {', '.join(_COLUMNS)} FROM accumulator WHERE id = ?", number)
    ledger = store.rows("SELECT position, record FROM ledger WHERE accumulator = ?", number)
    events = store.rows("SELECT position, record FROM event WHERE accumulator = ? ORDER BY position", number)
    gradients = store.rows(
        "SELECT position, contribution, names, blob FROM gradient WHERE accumulator = ? ORDER BY position", number
    )
    averages = store.rows("SELECT round, record, names, blob FROM average WHERE accumulator = ? ORDER BY round", number)
    return MovableAccumulator(
        columns=(*key, *columns),
        ledger=ledger[0] if ledger else None,
        events=tuple(events),
        gradients=tuple(_values(store, *row) for row in gradients),
        averages=tuple(_values(store, *row) for row in averages),
    )


def addition(store: StateStore, moved: MovableAccumulator) -> Change:
    """Returns what adds an accumulator to those that have come to a state directory."""
    (last,) = store.rows("SELECT coalesce(max(id), 0) FROM accumulator")[0]
    number = last + 1
    change = Change()
    change.execute(
        f"INSERT INTO accumulator (id, {', '.join(_COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        number,
        INCOMING,
        json.dumps(moved.key),
        *moved.columns[2:],
    )
    _add_contents(store, change, number, moved)
    return change


def _add_contents(store: StateStore, change: Change, number: int, moved: MovableAccumulator) -> None:
    """Adds to a change what writes down everything of an accumulator but its row, which has a number."""
    if moved.ledger is not None:
        change.execute("INSERT INTO ledger (accumulator, position, record) VALUES (?, ?, ?)", number, *moved.ledger)
    for event in moved.events:
        change.execute("INSERT INTO event (accumulator, position, record) VALUES (?, ?, ?)", number, *event)
    for statement, values in (
        (
            "INSERT INTO gradient (accumulator, position, contribution, names, blob) VALUES (?, ?, ?, ?, ?)",
            moved.gradients,
        ),
        ("INSERT INTO average (accumulator, round, record, names, blob) VALUES (?, ?, ?, ?, ?)", moved.averages),
    ):
        for each in values:
            blob = store.new_blob()
            change.put(blob, each.arrays)
            change.execute(statement, number, each.place, each.record, each.names, blob)


def replacement(store: StateStore, number: int, whole: MovableAccumulator) -> Change:
    """Returns what replaces all that there is of an accumulator with a number, but for its name."""
    change = Change()
    blobs = _blobs(store, number)
    for table in ("ledger", "event", "gradient", "average", "part"):
        change.execute(f"DELETE FROM {table} WHERE accumulator = ?", number)
    change.remove(blobs)
    change.execute("UPDATE accumulator SET spec = ? WHERE id = ?", whole.spec, number)
    _add_contents(store, change, number, whole)
    return change


def removal_of_incoming(store: StateStore) -> Change:
    """Returns what removes all accumulators that have come to a state directory."""
    change = Change()
    for number in keys_of(store, incoming=True).values():
        _remove(store, change, number)
    return change


def acceptance(store: StateStore, outgoing: Sequence[Key]) -> Change:
    """Returns what removes accumulators, as far as they are there, and gives their places to those that have come."""
    change = Change()
    numbers = keys_of(store)
    for key in outgoing:
        if key in numbers:
            _remove(store, change, numbers[key])
    for (container, name), number in keys_of(store, incoming=True).items():
        change.execute("UPDATE accumulator SET container = ?, name = ? WHERE id = ?", container, name, number)
    return change


def _remove(store: StateStore, change: Change, number: int) -> None:
    blobs = _blobs(store, number)
    change.execute("DELETE FROM accumulator WHERE id = ?", number)
    change.remove(blobs)


def _blobs(store: StateStore, number: int) -> list[int]:
    rows = store.rows(
        "SELECT blob FROM average WHERE accumulator = ?1 UNION SELECT blob FROM gradient WHERE accumulator = ?1 "
        "UNION SELECT blob FROM part WHERE accumulator = ?1",
        number,
    )
    return [blob for (blob,) in rows]


def _values(store: StateStore, place: int, record: str, names: str, blob: int) -> StoredValues:
    return StoredValues(place, record, names, store.read(blob, np.empty))


def _replaced(columns: tuple[str, ...], place: int, value: str) -> tuple[str, ...]:
    return (*columns[:place], value, *columns[place + 1 :])


def _anywhere(spec: str) -> Any:
    """Returns the record of a specification without the servers over which it is sharded."""
    record = json.loads(spec)
    if record.pop("num_shards", 0):
        for component in record["components"]:
            del component["pieces"]
    return record
