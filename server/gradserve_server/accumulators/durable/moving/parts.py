"""What servers hold of the gradients of sharded accumulators, as values that can be divided in another way."""

import json
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple, TypeAlias

import numpy as np

from gradserve_server.accumulators.durable.inspection import unlimited_calls
from gradserve_server.accumulators.durable.moving.rows import Key, number_of
from gradserve_server.accumulators.durable.records import read_ledger
from gradserve_server.accumulators.durable.spec_records import joined, split
from gradserve_server.accumulators.gradient import Array, SparseSlices, Value
from gradserve_server.accumulators.shard_journal import PartKey, Staged
from gradserve_server.state.files.errors import DAMAGES, StateError
from gradserve_server.state.files.store import Change, StateStore


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
        ledger, _ = read_ledger(store.rows, number, unlimited_calls())
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
        layout, arrays = split(values)
        blob = store.new_blob()
        change.put(blob, arrays)
        change.execute(
            "INSERT INTO part (accumulator, home, id, epoch, local_step, names, blob) VALUES (?, ?, ?, ?, ?, ?, ?)",
            number,
            *part,
            *staged,
            json.dumps(layout),
            blob,
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
