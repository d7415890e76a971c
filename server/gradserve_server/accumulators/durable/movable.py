"""Accumulators of a state directory as values with digests, which another state directory can take over.

No server uses either directory during the move. What arrives is stored beside the accumulators of the directory, even
under the same container and name, and takes their place once all directories have everything.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gradserve_server.accumulators.durable.restoring import INCOMING, blobs_of, read_ledger, unlimited_calls
from gradserve_server.accumulators.gradient import Array, SparseSlices, Value
from gradserve_server.accumulators.journal import PartKey, Staged, put_values
from gradserve_server.accumulators.records import joined
from gradserve_server.storage.directory import DAMAGES, StateError
from gradserve_server.storage.store import Change, StateStore

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
    blobs = blobs_of(store, number)
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
    """Returns the change that removes accumulators, if they exist, and puts newcomers in their places."""
    change = Change()
    numbers = keys_of(store)
    for key in outgoing:
        if key in numbers:
            _remove(store, change, numbers[key])
    for (container, name), number in keys_of(store, incoming=True).items():
        change.execute("UPDATE accumulator SET container = ?, name = ? WHERE id = ?", container, name, number)
    return change


def _remove(store: StateStore, change: Change, number: int) -> None:
    blobs = blobs_of(store, number)
    change.execute("DELETE FROM accumulator WHERE id = ?", number)
    change.remove(blobs)


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


class Rows(NamedTuple):
    """Rows of a component.

    Attributes:
        start: The first one.
        stop: The one after the last; None for the whole component, which cannot be divided.
    """

    start: int
    stop: int | None


Slices: TypeAlias = Mapping[str, tuple[int, Value]]
"""Some rows of components of a gradient, by name, with the first row of each."""


def needed(store: StateStore, number: int) -> dict[int, frozenset[str]]:
    """Returns the gradients that a sharded accumulator needs, if this is its home: their ids, by round.

    These are the rounds whose averages are kept, and the current one if it has gradients.

    Raises:
        StateError: A record is damaged.
    """
    rounds: dict[int, frozenset[str]] = {}
    try:
        for (text,) in store.rows("SELECT record FROM average WHERE accumulator = ?", number):
            record = json.loads(text)
            rounds[record["round_number"]] = frozenset(record["parts"]["ids"])
        ledger, _ = read_ledger(store, number, unlimited_calls())
    except DAMAGES as error:
        raise StateError(f"{store.path}: a record of an accumulator is damaged: {error}") from error
    held = frozenset(each.part for each in ledger.rounds.members.held)
    return rounds | {ledger.rounds.current.number: held} if held else rounds


def parts_of(store: StateStore, number: int) -> dict[PartKey, Staged]:
    """Returns the gradients held for an accumulator, with what was said of them, in the order of their arrival."""
    rows = store.rows("SELECT home, id, epoch, local_step FROM part WHERE accumulator = ? ORDER BY blob", number)
    return {PartKey(home, part_id): Staged(*staged) for home, part_id, *staged in rows}


def read_part(store: StateStore, number: int, part: PartKey) -> dict[str, Value]:
    """Returns what is held of a gradient, after it was verified.

    Raises:
        StateError: It is damaged.
    """
    ((names, blob),) = store.rows(
        "SELECT names, blob FROM part WHERE accumulator = ? AND home = ? AND id = ?", number, *part
    )
    try:
        return joined(json.loads(names), store.read(blob, np.empty))
    except DAMAGES as error:
        raise StateError(f"{store.path}: the record of a gradient is damaged: {error}") from error


def slices_of(
    store: StateStore, key: Key, parts: Collection[PartKey], wanted: Mapping[str, tuple[int, Rows]]
) -> dict[PartKey, Slices]:
    """Returns some rows of what is held of gradients.

    Args:
        store: The state directory.
        key: The accumulator.
        parts: The gradients.
        wanted: The rows of each component, after the first one that is held of it.
    """
    number = number_of(store, key)

    def slices(part: PartKey) -> Slices:
        values = read_part(store, number, part)
        return {name: (rows.start, _cut(values[name], held, rows)) for name, (held, rows) in wanted.items()}

    return {part: slices(part) for part in parts}


def addition_of_parts(
    store: StateStore,
    key: Key,
    parts: Mapping[PartKey, Staged],
    names: Sequence[str],
    given: Sequence[Mapping[PartKey, Slices]],
) -> Change:
    """Returns what adds gradients to those that are held for an accumulator that has come.

    Args:
        store: The state directory.
        key: The accumulator.
        parts: The gradients, with their local steps.
        names: The components of which the server has something.
        given: All rows of them, in any order.
    """
    number = number_of(store, key, incoming=True)
    change = Change()
    for part, staged in parts.items():
        values = {name: _put_together([each[part][name] for each in given if name in each[part]]) for name in names}
        blob, layout = put_values(store, change, values)
        change.execute(
            "INSERT INTO part (accumulator, home, id, epoch, local_step, names, blob) VALUES (?, ?, ?, ?, ?, ?, ?)",
            *(number, *part, *staged, layout, blob),
        )
    return change


def digests_of(
    store: StateStore,
    number: int,
    part: PartKey,
    held: Mapping[str, Rows],
    cuts: Mapping[str, Collection[int]],
) -> dict[tuple[str, int], str]:
    """Returns digests of what is held of a gradient: of rows that are together before a change and after it.

    Args:
        store: The state directory.
        number: The number of the accumulator there.
        part: The gradient.
        held: The rows that are held of each component.
        cuts: The rows at which components are divided.

    Returns:
        SHA-256 of dtype, sizes and elements, in hexadecimal digits, by component and first row.

    Raises:
        StateError: It is damaged, or has not these rows.
    """
    values = read_part(store, number, part)
    if values.keys() != held.keys():
        raise StateError(f"{store.path}: gradient {part.id} has components {sorted(values)}, not {sorted(held)}")
    found = {}
    for name, rows in held.items():
        for each in _between(rows, cuts.get(name, ())):
            found[name, each.start] = _digest(_cut(values[name], rows.start, each))
    return found


def _between(rows: Rows, cuts: Collection[int]) -> list[Rows]:
    """Divides rows."""
    if rows.stop is None:
        return [rows]
    stops = [*sorted(each for each in cuts if rows.start < each < rows.stop), rows.stop]
    return [Rows(start, stop) for start, stop in zip([rows.start, *stops], stops, strict=False)]


def _cut(value: Value, held: int, rows: Rows) -> Value:
    if rows.stop is None:
        return value
    if isinstance(value, SparseSlices):
        raise StateError("a gradient of rows is divided")
    part = value[rows.start - held : rows.stop - held]
    if len(part) != rows.stop - rows.start:
        raise StateError(f"a gradient has {len(value)} rows from {held} on, not rows {rows.start} to {rows.stop}")
    return part


def _put_together(slices: Sequence[tuple[int, Value]]) -> Value:
    (_, first), *others = sorted(slices, key=lambda each: each[0])
    if not others:
        return first
    arrays: list[Array] = []
    for _, value in [(0, first), *others]:
        assert not isinstance(value, SparseSlices), "`_cut` does not divide them"
        arrays.append(value)
    return np.concatenate(arrays)


def _digest(value: Value) -> str:
    arrays = [value.indices, value.values] if isinstance(value, SparseSlices) else [value]
    specs = [[each.dtype.name, each.shape] for each in arrays]
    dense_shape = value.dense_shape if isinstance(value, SparseSlices) else None
    found = sha256(json.dumps([specs, dense_shape]).encode())
    for each in arrays:
        found.update(np.ascontiguousarray(each).reshape(-1).view(np.uint8).data)
    return found.hexdigest()
