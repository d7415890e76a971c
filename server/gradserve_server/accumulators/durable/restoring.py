"""Restores the accumulators of a state directory when a server starts; inspects and repairs them without one."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.factory import AccumulatorFactory
from gradserve_server.accumulators.gradient import Average, Gradient
from gradserve_server.accumulators.identity import CallMemory, RequestId
from gradserve_server.accumulators.journal import (
    AccumulatorJournals,
    FileJournal,
    RoundTables,
    ShardJournal,
    seen_rounds,
)
from gradserve_server.accumulators.ledger import Answer, Ledger
from gradserve_server.accumulators.places.place import HostPlace, Places
from gradserve_server.accumulators.records import ACCUMULATORS, average_of, contribution_of, joined, spec_of
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.accumulators.rounds import Rounds
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.config import LimitsConfig
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.resources.budget import UNLIMITED, Budget
from gradserve_server.resources.cluster import MisplacedError
from gradserve_server.resources.lifetimes import Lifetime, Lifetimes
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.security.identity import ShareRules, owner_named
from gradserve_server.storage.directory import DAMAGES, StateError
from gradserve_server.storage.journal import RESIZED, Durability, num_incoming
from gradserve_server.storage.segments import Allocate
from gradserve_server.storage.store import Change, StateStore


@dataclass(frozen=True)
class StoredAccumulator:
    """The row of an accumulator.

    Attributes:
        number: Its number in the state directory.
        key: Its name.
        incarnation: Its incarnation.
        spec: Its specification.
        lifetime: Its lifetime.
    """

    number: int
    key: ResourceKey
    incarnation: str
    spec: AccumulatorSpec
    lifetime: Lifetime

    @property
    def durability(self) -> Durability:
        """Its durability, which is not NONE."""
        assert self.spec.durability is not None, "`of_row` has checked it"
        return self.spec.durability

    @classmethod
    def of_row(
        cls, number: int, container: str, name: str, owner: str, incarnation: str, spec: str, lifetime: str
    ) -> "StoredAccumulator":
        """Reads the columns of `SELECT_ACCUMULATORS`.

        Raises:
            DAMAGES: They are damaged.
        """
        key = ResourceKey(container, name, owner_named(owner))
        found = spec_of(json.loads(spec))
        if found.durability in (None, Durability.NONE):
            raise ValueError("its durability is NONE")
        return cls(number, key, incarnation, found, Lifetime(**json.loads(lifetime)))


SELECT_ACCUMULATORS = "SELECT id, container, name, owner, incarnation, spec, lifetime FROM accumulator ORDER BY id"


async def restore_accumulators(journals: AccumulatorJournals, registry: AccumulatorRegistry, allocate: Allocate) -> int:
    """Restores all accumulators of a state directory; returns their number.

    Args:
        journals: The journals of the state directory.
        registry: Gets the accumulators.
        allocate: Allocates memory for their values.

    Raises:
        DamagedError: Something is damaged.
        StateError: An accumulator belongs to another server, or to a cluster of another size.
        ResourceExhaustedError: They exceed the limits of the server.
    """
    store = journals.store
    # Short-lived and in another thread, so it counts in no budget.
    journals.new_state = lambda: Ledger(registry.factory.new_call_memory(Budget(UNLIMITED, "bytes").reserve()))
    rows = store.rows(SELECT_ACCUMULATORS)
    if num_incoming(store):
        raise StateError(f"{store.path}: {RESIZED}")
    for number, container, name, *columns in rows:
        try:
            row = StoredAccumulator.of_row(number, container, name, *columns)
            calls = registry.factory.new_call_memory(registry.factory.bookkeeping_of(row.key))
            averages = (average_in(store, allocate, *each) for each in average_rows(store, number))
            journal_of = partial(journals.begin_again, row.key, number, row.durability)
            accumulator = await make_again(store, row, registry, calls, journal_of, averages, allocate)
            if accumulator.shard is not None:
                for part in journals.of(row.key).shard.read(allocate):
                    await accumulator.shard.stage_again(*part)
        except ResourceExhaustedError:
            raise
        except MisplacedError as error:
            raise StateError(
                f"{store.path}: {error}; the directory is whole: start each server on its own directory, and "
                "as many of them as there were, or change their number with `gradserve cluster resize`"
            ) from error
        except DAMAGES as error:
            raise journals.damaged(ResourceKey(container, name), error) from error
    return len(rows)


async def make_again(
    store: StateStore,
    row: StoredAccumulator,
    registry: AccumulatorRegistry,
    calls: CallMemory[Answer],
    journal_of: Callable[[int], FileJournal | None],
    averages: Iterable[tuple[Average, Sequence[RequestId]]],
    allocate: Allocate,
) -> Accumulator:
    """Restores an accumulator of a state directory.

    Args:
        store: The state directory.
        row: The row of the accumulator.
        registry: Gets it.
        calls: An empty memory of calls, for its ledger.
        journal_of: Makes its journal, given the position of its latest event.
        averages: Its averages, with the calls that they answered, by round.
        allocate: Allocates memory for its gradients.

    Raises:
        StateError: A value cannot be read.
        DAMAGES: A record is damaged.
    """
    ledger, position = read_ledger(store, row.number, calls)
    journal = journal_of(position)
    accumulator = registry.restore(row.key, row.spec, row.lifetime, row.incarnation, ledger, journal)
    accumulator.see_again(seen_rounds(store, row.number))
    for average, answered in averages:
        await accumulator.keep_again(average, answered)
    gradients = store.rows(
        "SELECT contribution, names, blob FROM gradient WHERE accumulator = ? ORDER BY position", row.number
    )
    count = 0
    for record, names, blob in gradients:
        contribution = contribution_of(json.loads(record))
        values = joined(json.loads(names), store.read(blob, allocate))
        count += contribution.num_gradients
        await accumulator.add_again(Gradient(values, owned=True, finite=frozenset(values)), contribution)
    _check_sum(accumulator, count)
    return accumulator


def average_rows(store: StateStore, number: int, tables: RoundTables = FileJournal.tables) -> list[tuple[Any, ...]]:
    """Returns the rows of the averages of an accumulator, or of versions: round, record, names and blob, by round."""
    return store.rows(
        f"SELECT round, record, names, blob FROM {tables.averages} WHERE {tables.resource} = ? ORDER BY round", number
    )


def average_in(
    store: StateStore, allocate: Allocate, number: int, record: str, names: str, blob: int, *, what: str = "average"
) -> tuple[Average, list[RequestId]]:
    """Returns the average of a row, or whatever `what` calls it, and the calls that it answered.

    Raises:
        StateError: Its values cannot be read.
        DAMAGES: Its record is damaged.
    """
    average, answered = average_of(json.loads(record), joined(json.loads(names), store.read(blob, allocate)))
    if average.round_number != number:
        raise ValueError(f"expected the {what} of round {number}, got that of round {average.round_number}")
    return average, answered


def read_ledger(store: StateStore, number: int, calls: CallMemory[Answer]) -> tuple[Ledger, int]:
    """Returns the ledger of an accumulator, and the position of the latest event in it.

    Args:
        store: The state directory.
        number: The number of the accumulator there.
        calls: An empty memory of calls, for the ledger.

    Raises:
        StateError, DAMAGES: A record is damaged.
    """
    ledger = Ledger(calls)
    return ledger, ACCUMULATORS.replay(store.rows, number, ledger)


def _check_sum(accumulator: Accumulator, num_gradients: int) -> None:
    expected = accumulator.num_accumulated
    if num_gradients != expected:
        raise ValueError(f"expected {expected} gradients of the current round, got {num_gradients}")


@dataclass(frozen=True)
class Found:
    """An accumulator of a state directory; or parameters, with updates and versions for gradients and averages.

    Attributes:
        tables: The tables of its kind.
        number: Its number there.
        key: Its name.
        durability: Its durability.
        step: Its global_step; None if that cannot be read.
        num_gradients: The gradients of its current round.
        averages: The rounds whose averages can be read.
        damaged_averages: The rounds whose averages cannot be read, each with the reason.
        damage: The reason why the accumulator cannot be used, None if it can.
    """

    tables: RoundTables
    number: int
    key: ResourceKey
    durability: str
    step: int | None
    num_gradients: int
    averages: tuple[int, ...]
    damaged_averages: Mapping[int, str]
    damage: str | None


Kept: TypeAlias = tuple[Average, Sequence[RequestId]]
"""An average, and the calls that it answered."""
Row: TypeAlias = tuple[Any, ...]


def inspect(store: StateStore) -> Iterator[Found]:
    """Restores each accumulator as a starting server does, and yields it with any damage."""
    reducer = Reducer(ForkJoin(1))

    def rounds_of(row: Row) -> Rounds:
        return read_ledger(store, row[0], unlimited_calls())[0].rounds

    async def make(row: Row, averages: Sequence[Kept]) -> None:
        await _make_again(store, reducer, StoredAccumulator.of_row(*row), averages)

    return found_in(store, FileJournal.tables, store.rows(SELECT_ACCUMULATORS), rounds_of, make)


def found_in(
    store: StateStore,
    tables: RoundTables,
    rows: Sequence[Row],
    rounds_of: Callable[[Row], Rounds],
    make: Callable[[Row, Sequence[Kept]], Coroutine[Any, Any, object]],
    *,
    what: str = "average",
) -> Iterator[Found]:
    """Yields all resources of one kind by name, with any damage.

    Args:
        store: The state directory.
        tables: The tables of the kind.
        rows: The rows of the resources: number, container, name and others.
        rounds_of: Reads the rounds of a resource.
        make: Restores a resource as a starting server does, given its averages.
        what: The result of a round, for messages.
    """
    levels = dict(store.rows(f"SELECT id, durability FROM {tables.resource}"))
    for row in sorted(rows, key=lambda row: (row[1], row[2])):
        number, container, name, *_ = row
        averages, damaged = _readable(store, average_rows(store, number, tables), what)
        step, num_gradients, damage = None, 0, None
        with suppress(StateError, *DAMAGES):
            rounds = rounds_of(row)
            step, num_gradients = rounds.global_step, rounds.num_accumulated
        try:
            asyncio.run(make(row, list(averages.values())))
        except (StateError, *DAMAGES) as error:
            damage = _reason_of(error)
        key = ResourceKey(container, name)
        yield Found(tables, number, key, levels[number], step, num_gradients, tuple(averages), damaged, damage)


def _readable(store: StateStore, rows: Iterable[Row], what: str) -> tuple[dict[int, Kept], dict[int, str]]:
    """Returns the averages of rows by round, or whatever `what` calls them; and why others cannot be read."""
    averages: dict[int, Kept] = {}
    damaged = {}
    for row in rows:
        try:
            averages[row[0]] = average_in(store, np.empty, *row, what=what)
        except (StateError, *DAMAGES) as error:
            damaged[row[0]] = _reason_of(error)
    return averages, damaged


async def _make_again(
    store: StateStore,
    reducer: Reducer,
    row: StoredAccumulator,
    averages: Iterable[Kept],
) -> None:
    """Restores an accumulator on the host of a server without limits that writes nothing.

    Raises:
        StateError, DAMAGES: A server cannot make it again.
    """
    factory, lifetimes = unlimited_factory(reducer)
    registry = AccumulatorRegistry(factory, lifetimes, new_incarnation=str)
    on_host = replace(row, spec=row.spec.on("cpu"))
    await make_again(store, on_host, registry, unlimited_calls(), lambda _: None, averages, np.empty)
    for _ in ShardJournal(store, row.number).read(np.empty):
        pass


def unlimited_factory(reducer: Reducer) -> tuple[AccumulatorFactory, Lifetimes]:
    """Returns what makes accumulators on the host without limits, to inspect them with."""
    lifetimes = Lifetimes(lambda: 0.0, 1.0)
    memory = Budget(UNLIMITED, "bytes of tensor memory", ShareRules())
    factory = AccumulatorFactory(
        places=Places(HostPlace("cpu", reducer, np.empty, InlineCompute(), memory)),
        bookkeeping=Budget(UNLIMITED, "bytes of bookkeeping", ShareRules()),
        limits=LimitsConfig(),
        lifetimes=lifetimes,
    )
    return factory, lifetimes


def _reason_of(error: Exception) -> str:
    """Returns the text of an error, or its type if it has none."""
    return str(error) or type(error).__name__


def read_average(store: StateStore, number: int) -> Average:
    """Returns the newest average of an accumulator.

    Raises:
        StateError: There is none, or it is damaged.
        DAMAGES: Its record is damaged.
    """
    rows = average_rows(store, number)[-1:]
    if not rows:
        raise StateError("there is no average")
    return average_in(store, np.empty, *rows[0])[0]


def average_bytes(store: StateStore, number: int) -> int:
    """Returns the size of the newest average of an accumulator; 0 if there is none that can be read."""
    rows = store.rows("SELECT blob FROM average WHERE accumulator = ? ORDER BY round DESC LIMIT 1", number)
    return store.size_of(rows[0][0]) if rows else 0


def removal(store: StateStore, found: Found) -> Change | None:
    """Returns the change that removes the damaged averages of an accumulator, or all of it if it is unusable."""
    change, tables = Change(), found.tables
    if found.damage is not None:
        change.remove(_blobs_of(store, tables, found.number))
        change.execute(f"DELETE FROM {tables.resource} WHERE id = ?", found.number)
    elif found.damaged_averages:
        for round_number in found.damaged_averages:
            where = f"FROM {tables.averages} WHERE {tables.resource} = ? AND round = ?"
            change.remove(blob for (blob,) in store.rows(f"SELECT blob {where}", found.number, round_number))
            change.execute(f"DELETE {where}", found.number, round_number)
    else:
        return None
    return change


def _blobs_of(store: StateStore, tables: RoundTables, number: int) -> list[int]:
    with_blobs = [each for each in (tables.averages, tables.gradients, tables.parts, tables.states) if each]
    selects = [f"SELECT blob FROM {each} WHERE {tables.resource} = ?1" for each in with_blobs]
    return [blob for (blob,) in store.rows(" UNION ".join(selects), number)]


def unlimited_calls() -> CallMemory[Answer]:
    """Returns an empty memory of calls that forgets none, to read a ledger with."""
    return CallMemory(
        window=UNLIMITED,
        max_clients=UNLIMITED,
        silence=float("inf"),
        clock=lambda: 0.0,
        bookkeeping=Budget(UNLIMITED, "bytes").reserve(),
    )
