"""Divides sharded parameters again when their cluster gets another number of servers.

Each server has pieces of the version and of the optimizer's state; the home decides. The newest version moves, with the
state and with all that the home has decided: step, rules, request ids and the records of rounds. Older versions do not.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from gradserve_protocol.digest import digest_of
from gradserve_protocol.placement import plan_of
from gradserve_ray.states.movable import (
    Key,
    MovableResource,
    Rows,
    StoredValues,
    cut,
    digests_between,
    number_of,
    put_together,
    read_movable,
)
from gradserve_ray.states.shards import Division, Planned, without_parts, without_parts_in_event
from gradserve_server.accumulators.durable.restoring import unlimited_calls
from gradserve_server.accumulators.gradient import Array, Average
from gradserve_server.accumulators.records import average_record, joined, split
from gradserve_server.accumulators.spec import Piece
from gradserve_server.parameters.journal import (
    parameters_spec_of,
    parameters_spec_record,
    round_record_of,
    round_record_record,
    state_of,
    update_ledger_record,
)
from gradserve_server.parameters.ledger import UpdateLedger, VersionLoaded
from gradserve_server.parameters.optimizers import optimizer_of
from gradserve_server.parameters.record import DecidedRound
from gradserve_server.parameters.spec import ParametersSpec
from gradserve_server.storage.store import StateStore

Pieces: TypeAlias = Mapping[tuple[str, str], tuple[int, Array]]
"""Rows of the values of components, and of the slots of the optimizer, with the first row of each, by slot and
component. The slot of values is empty."""

PieceDigests: TypeAlias = dict[tuple[str, str, int], str]
"""Digests of rows, by slot, component and first row."""


@dataclass(frozen=True)
class ParametersShard:
    """One server's shard of sharded parameters, but for values.

    Attributes:
        spec: Their specification there, as JSON.
        step: The step of its newest version.
        state: The record of the optimizer's state, as JSON.
    """

    spec: str
    step: int
    state: str

    @classmethod
    def of(cls, movable: MovableResource) -> "ParametersShard":
        """Returns the shard that a state directory has."""
        assert movable.optimizer is not None, "they are parameters"
        return cls(movable.spec, json.loads(movable.averages[-1].record)["step"], movable.optimizer.record)


def read_outline(store: StateStore, key: Key) -> MovableResource:
    """Returns the decisions of the home of sharded parameters, with its newest version, all without values."""
    found = read_movable(store, key, with_values=False)
    return replace(found, averages=found.averages[-1:])


def decided_since(store: StateStore, key: Key, step: int) -> tuple[DecidedRound, ...]:
    """Returns the rounds after a step, if this is the state directory of the home."""
    number = number_of(store, key)
    rows = store.rows(
        "SELECT record FROM parameters_round WHERE parameters = ? AND step > ? ORDER BY step", number, step
    )
    records = [round_record_of(json.loads(record)) for (record,) in rows]
    return tuple(record.decided for record in records if record.decided is not None)


def read_pieces(store: StateStore, key: Key, wanted: Mapping[str, tuple[int, Rows]], *, incoming: bool) -> Pieces:
    """Returns some rows of the newest version, and of the optimizer's state.

    Args:
        store: The state directory.
        key: The parameters.
        wanted: The rows of each component, after the first one that the server has.
        incoming: Whether to read those that have come.
    """
    number = number_of(store, key, incoming=incoming)
    ((names, blob),) = store.rows(
        "SELECT names, blob FROM parameters_version WHERE parameters = ? ORDER BY round DESC LIMIT 1", number
    )
    ((record, state_blob),) = store.rows("SELECT record, blob FROM parameters_state WHERE parameters = ?", number)
    held: dict[tuple[str, str], Any] = {
        ("", name): value for name, value in joined(json.loads(names), store.read(blob, np.empty)).items()
    }
    state = state_of(json.loads(record), store.read(state_blob, np.empty))
    held |= {(slot, name): array for slot, arrays in state.slots.items() for name, array in arrays.items()}
    return {
        (slot, name): (wanted[name][1].start, np.asarray(cut(array, *wanted[name])))
        for (slot, name), array in held.items()
        if name in wanted
    }


def piece_digests(pieces: Pieces, rows: Mapping[str, Rows], cuts: Mapping[str, Collection[int]]) -> PieceDigests:
    """Returns digests of rows that are together before a change and after it, as `digests_between` does."""
    found: PieceDigests = {}
    for (slot, name), (_, array) in pieces.items():
        for start, digest in digests_between(array, rows[name], cuts.get(name, ())).items():
            found[slot, name, start] = digest
    return found


@dataclass(frozen=True)
class Redivision:
    """A change of the servers over which parameters are sharded.

    Attributes:
        key: Their name.
        source: Their home before.
        target: Their home after.
        servers: The number of servers after.
        steps: The rounds in which each component had an update.
        before: Which server has what before.
        after: Which server has what after.
    """

    key: Key
    source: int
    target: int
    servers: int
    steps: Mapping[str, int]
    before: Division
    after: Division

    @classmethod
    def of(cls, key: Key, shards: Mapping[int, ParametersShard], before: int, after: int) -> "Redivision":
        """Plans the change, given the shards of all servers that have one."""
        source, target = key.home(before), key.home(after)
        spec = parameters_spec_of(json.loads(shards[source].spec))
        steps = {
            name: count
            for shard in shards.values()
            for name, count in json.loads(shard.state)["component_steps"].items()
        }
        now = Division(spec.updates)
        later = Division(_redivided(spec, target, after).updates)
        return cls(key, source, target, after, steps, now, later)

    @cached_property
    def cuts(self) -> dict[str, set[int]]:
        """The rows at which components are divided before or after, by component."""
        return self.before.cuts_with(self.after)

    def shard(self, server: int, outline: MovableResource, given: Sequence[Pieces]) -> MovableResource:
        """Returns the shard of a server.

        Args:
            server: The server.
            outline: The decisions of the home.
            given: All rows that it gets, in any order.
        """
        names = list(self.after.rows[server])
        arrays = {
            place: np.asarray(put_together([each[place] for each in given if place in each]))
            for place in dict.fromkeys(place for each in given for place in each)
        }
        values = {name: arrays["", name] for name in names}
        assert outline.optimizer is not None, "they are parameters"
        state = json.loads(outline.optimizer.record)
        # Servers without 16-bit components have no slot of masters.
        order = dict.fromkeys([*state["slots"], *(slot for slot, _ in arrays if slot)])
        slots = {slot: held for slot in order if (held := [name for name in names if (slot, name) in arrays])}
        state |= {"slots": slots, "component_steps": {name: self.steps[name] for name in names}}
        optimizer = StoredValues(
            0, json.dumps(state), "", [arrays[slot, name] for slot, of_slot in slots.items() for name in of_slot]
        )
        made = outline if server == self.target else self._follower(outline)
        (version,) = made.averages
        layout, in_order = split(values)
        version = replace(version, names=json.dumps(layout), arrays=in_order)
        made = replace(
            made, averages=(version,), optimizer=optimizer, rounds=_with_digest(made.rounds, version, values)
        )
        spec = _redivided(parameters_spec_of(json.loads(outline.spec)), self.target, self.servers, server)
        if self.servers == 1:  # Sharding is over several servers: clients of one ask for whole parameters.
            spec = _whole(spec)
            made = replace(
                made,
                ledger=None if made.ledger is None else (made.ledger[0], without_parts(made.ledger[1])),
                events=tuple((position, without_parts_in_event(text)) for position, text in made.events),
            )
        durability = spec.here.durability
        assert durability is not None, "it was chosen when they were created"
        return made.with_spec(json.dumps(parameters_spec_record(spec))).with_durability(durability.value)

    def _follower(self, outline: MovableResource) -> MovableResource:
        """Returns the decisions of another server than the home: the version was loaded."""
        spec = parameters_spec_of(json.loads(outline.spec))
        step = json.loads(outline.averages[0].record)["step"]
        assert outline.optimizer is not None, "they are parameters"
        optimizer = optimizer_of(json.loads(outline.optimizer.record)["optimizer"])
        ledger = UpdateLedger(unlimited_calls(), spec)
        # The home tells the rest of its rules with each round.
        ledger.end_round(VersionLoaded(None, ledger.now, step, replace(spec.rules, optimizer=optimizer)))
        record = json.dumps(average_record(Average({}, step, 0, 0, 0.0, ()), ()))
        return replace(
            outline,
            ledger=(0, json.dumps(update_ledger_record(ledger))),
            events=(),
            averages=(StoredValues(0, record, "", ()),),
            rounds=(),
        )


def _redivided(spec: ParametersSpec, home: int, servers: int, server: int = 0) -> ParametersSpec:
    """Returns the properties of parameters on one of another number of servers."""
    planned = [Planned(each.name, each.dtype, each.shape.dims, each.is_sparse) for each in spec.components]
    plan = plan_of(planned, home, servers)
    components = [each._replace(pieces=tuple(Piece(*piece) for piece in plan[each.name])) for each in spec.components]
    return replace(spec, components=tuple(components), num_shards=servers, server=server, follows=server != home)


def _whole(spec: ParametersSpec) -> ParametersSpec:
    """Returns the properties of parameters that are on one server."""
    components = [each._replace(pieces=()) for each in spec.components]
    return replace(spec, components=tuple(components), num_shards=0, server=0, follows=False)


def _with_digest(
    rounds: Sequence[tuple[int, str]], version: StoredValues, values: Mapping[str, Array]
) -> tuple[tuple[int, str], ...]:
    """Returns records of rounds of which the newest has the digest of a version, as a server compares them."""
    if not rounds or rounds[-1][0] != json.loads(version.record)["step"]:
        return tuple(rounds)
    *_, newest = rounds
    record = replace(round_record_of(json.loads(newest[1])), digest_after=digest_of(values.values()))
    before = round_record_of(json.loads(rounds[-2][1])).hash if len(rounds) > 1 else b""
    text = json.dumps(round_record_record(record.chained(before)))
    return (*rounds[:-1], (newest[0], text))
