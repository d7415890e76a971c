"""The division of what is sharded among the servers of a cluster, and the conversion back.

An accumulator whose shards have all moved to one server becomes an unsharded one.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gradserve_protocol.arrays import DType
from gradserve_ray.states.movable import (
    Key,
    MovableResource,
    Rows,
    StoredValues,
    number_of,
    parts_of,
    read_movable,
    read_part,
    replacement,
)
from gradserve_server.accumulators.gradient import Gradient, Value
from gradserve_server.accumulators.journal import PartKey
from gradserve_server.accumulators.places.place import HostPlace
from gradserve_server.accumulators.records import (
    average_of,
    average_record,
    contribution_of,
    contribution_record,
    spec_of,
    split,
)
from gradserve_server.accumulators.sharding.shard import Shard
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec
from gradserve_server.accumulators.sums.round_sum import RoundSum
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.resources.budget import UNLIMITED, Budget
from gradserve_server.storage.directory import DAMAGES, StateError
from gradserve_server.storage.journal import Record
from gradserve_server.storage.store import Change, StateStore


@dataclass(frozen=True)
class Planned:
    """A component, for `plan_of`."""

    name: str
    dtype: DType
    shape: tuple[int, ...] | None
    is_sparse: bool


class Division:
    """The division of the rows of an accumulator, or of parameters, among servers.

    Attributes:
        rows: The rows of each component that a server has something of, in the order of the components, by server.
    """

    def __init__(self, spec: AccumulatorSpec) -> None:
        self.rows: dict[int, dict[str, Rows]] = {}
        for component in spec.components:
            num_rows, start = _rows_of(component), 0
            for server, count in component.pieces:
                rows = Rows(0, None) if num_rows is None else Rows(start, start + (count or num_rows))
                self.rows.setdefault(server, {})[component.name] = rows
                start += count

    def cuts_with(self, later: "Division") -> dict[str, set[int]]:
        """Returns the first rows of all servers in this division and in a later one, by component."""
        found: dict[str, set[int]] = defaultdict(set)
        for held in (*self.rows.values(), *later.rows.values()):
            for name, rows in held.items():
                found[name].add(rows.start)
        return found

    def wanted(self, source: int, rows: Mapping[str, Rows]) -> dict[str, tuple[int, Rows]]:
        """Returns what a server has of some rows, by component, after the first row that it has."""
        found = {}
        for name, held in self.rows[source].items():
            if (want := rows.get(name)) is None:
                continue
            if held.stop is None or want.stop is None:
                found[name] = (0, held)
            elif (start := max(held.start, want.start)) < (stop := min(held.stop, want.stop)):
                found[name] = (held.start, Rows(start, stop))
        return found


def _rows_of(component: ComponentSpec) -> int | None:
    """Returns the rows of a component that can be divided, None of one that cannot."""
    dims = component.shape.dims
    return dims[0] or None if dims and not component.is_sparse else None


_UNKNOWN = ""
"""The fingerprint of a call whose content is not known."""


async def unshard(store: StateStore, key: Key) -> Change:
    """Returns the change that unshards an arrived accumulator, whose gradients are all held by this server.

    Its averages are computed from the gradients, as a server does after a restart, and have the same bits. Calls that
    brought gradients are remembered without fingerprints of their values, which the home has never seen.

    Raises:
        StateError: It is damaged.
        ServiceError: An average cannot be computed.
    """
    number = number_of(store, key, incoming=True)
    moved = read_movable(store, key, incoming=True)
    try:
        record = json.loads(moved.spec)
        whole = MovableResource(
            moved.kind,
            moved.with_spec(json.dumps(_of_whole_spec(record))).columns,
            None if moved.ledger is None else (moved.ledger[0], without_parts(moved.ledger[1])),
            tuple((position, without_parts_in_event(text)) for position, text in moved.events),
            tuple(_gradient(store, number, moved.incarnation, each) for each in moved.gradients),
            await _averages(store, number, spec_of(record), moved.averages),
        )
    except DAMAGES as error:
        raise StateError(f"{store.path}: {key} cannot be used: {error}") from error
    return replacement(store, number, whole)


async def _averages(
    store: StateStore, number: int, spec: AccumulatorSpec, decided: Sequence[StoredValues]
) -> tuple[StoredValues, ...]:
    """Returns averages with their values."""
    of_server = spec.shard(0)
    assert of_server is not None, "all of it is here"
    shard = _shard(of_server)
    staged = parts_of(store, number)
    found = []
    for each in sorted(decided, key=lambda each: each.place):  # A shard forgets what later rounds do not need.
        average, answered = average_of(json.loads(each.record), {})
        assert average.parts is not None, "it is sharded"
        for part_id in average.parts.ids:
            part = PartKey(average.parts.home_incarnation, part_id)
            values = read_part(store, number, part)
            await shard.stage_again(part, staged[part], Gradient(values, finite=frozenset(values)))
        values = dict((await shard.reduce(average)).values)
        record = average_record(replace(average, parts=None), answered)
        found.append(_stored(each.place, record, values))
    return tuple(found)


def _shard(spec: AccumulatorSpec) -> Shard:
    memory = Budget(UNLIMITED, "bytes")
    place = HostPlace("cpu", Reducer(ForkJoin(1)), np.empty, InlineCompute(), memory)

    def make_sum() -> RoundSum:
        return RoundSum(spec, place, memory=memory.reserve())

    return Shard(
        "of one server",
        spec,
        make_sum=make_sum,
        make_running_sum=None,
        memory=memory.reserve(),
        bookkeeping=memory.reserve(),
        journal=None,
    )


def _gradient(store: StateStore, number: int, incarnation: str, held: StoredValues) -> StoredValues:
    """Returns a gradient of the current round with its values."""
    contribution = contribution_of(json.loads(held.record))
    values = read_part(store, number, PartKey(incarnation, contribution.part))
    return _stored(held.place, contribution_record(replace(contribution, part="")), values)


def _stored(place: int, record: Record, values: dict[str, Value]) -> StoredValues:
    layout, arrays = split(values)
    return StoredValues(place, json.dumps(record), json.dumps(layout), arrays)


def _of_whole_spec(record: Record) -> Record:
    components = [{**each, "pieces": []} for each in record["components"]]
    return {**record, "components": components, "num_shards": 0}


def without_parts(text: str) -> str:
    """Returns the record of a ledger without the parts of gradients, whose fingerprints nobody knows."""
    record = json.loads(text)
    record["held"] = []
    for *_, rows in record["clients"]:
        for row in rows:
            _, _, _, *applied = row
            if applied:  # Those of a take have the content that they had.
                row[1] = _UNKNOWN
    return json.dumps(record)


def without_parts_in_event(text: str) -> str:
    """Returns the record of an event likewise."""
    record = json.loads(text)
    if record["event"] in ("gradient_answered", "update_answered"):
        record["contribution"].pop("part", None)
        if record["call"] is not None:
            record["call"]["fingerprint"] = _UNKNOWN
    return json.dumps(record)
