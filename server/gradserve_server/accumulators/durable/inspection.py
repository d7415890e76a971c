"""Inspects and repairs the accumulators of a state directory that no server uses."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradserve_server.accumulators.durable.journal import FileShardJournal
from gradserve_server.accumulators.durable.records import (
    INCOMING,
    SELECT_ACCUMULATORS,
    StoredAccumulator,
    average_in,
    average_rows,
    make_again,
    read_ledger,
)
from gradserve_server.accumulators.gradient import Average
from gradserve_server.accumulators.identity import CallMemory, RequestId
from gradserve_server.accumulators.journal import MemoryJournal, MemoryRecords
from gradserve_server.accumulators.ledger import Answer
from gradserve_server.accumulators.places.place import HostPlace, Places
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.config import LimitsConfig
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.resources.budget import Budget, FairBudget
from gradserve_server.resources.lifetimes import Lifetimes
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.security.shares import ShareRules
from gradserve_server.storage.directory import DAMAGES, StateError
from gradserve_server.storage.journal import NoJournal
from gradserve_server.storage.store import Change, StateStore

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
    """Restores each accumulator as a starting server does, and yields it with any damage."""
    reducer = Reducer(ForkJoin(1))
    rows = sorted(store.rows(SELECT_ACCUMULATORS), key=lambda row: (row[1], row[2]))
    levels = dict(store.rows("SELECT id, durability FROM accumulator"))
    for row in rows:
        yield _inspect_one(store, reducer, levels[row[0]], row)


def num_incoming(store: StateStore) -> int:
    """Returns the number of accumulators that have arrived with an unfinished change of the number of servers."""
    ((count,),) = store.rows("SELECT count(*) FROM accumulator WHERE container = ?", INCOMING)
    return int(count)


def _inspect_one(store: StateStore, reducer: Reducer, durability: str, row: tuple[Any, ...]) -> Found:
    number, container, name, *_ = row
    averages, damaged = {}, {}
    for average in average_rows(store, number):
        try:
            averages[average[0]] = average_in(store, np.empty, *average)
        except (StateError, *DAMAGES) as error:
            damaged[average[0]] = _reason(error)
    step, num_gradients, damage = None, 0, None
    with suppress(StateError, *DAMAGES):
        ledger, _ = read_ledger(store.rows, number, unlimited_calls())
        step, num_gradients = ledger.rounds.global_step, ledger.rounds.num_accumulated
    try:
        asyncio.run(_make_again(store, reducer, StoredAccumulator.of_row(*row), averages.values()))
    except (StateError, *DAMAGES) as error:
        damage = _reason(error)
    key = ResourceKey(container, name)
    return Found(number, key, durability, step, num_gradients, tuple(averages), damaged, damage)


async def _make_again(
    store: StateStore,
    reducer: Reducer,
    row: StoredAccumulator,
    averages: Iterable[tuple[Average, Sequence[RequestId]]],
) -> None:
    """Restores an accumulator on the host of a server without limits that writes nothing.

    Raises:
        StateError, DAMAGES: A server cannot make it again.
    """
    memory = FairBudget(_ENDLESS, "bytes of tensor memory", ShareRules())
    registry = AccumulatorRegistry(
        places=Places(HostPlace("cpu", reducer, np.empty, InlineCompute(), memory)),
        bookkeeping=FairBudget(_ENDLESS, "bytes of bookkeeping", ShareRules()),
        limits=LimitsConfig(),
        lifetimes=Lifetimes(lambda: 0.0, 1.0),
        clock=lambda: 0.0,
        new_incarnation=str,
        records=MemoryRecords(),
    )
    on_host = replace(row, spec=row.spec.on("cpu"))
    await make_again(
        store, on_host, registry, unlimited_calls(), lambda _: MemoryJournal(NoJournal()), averages, np.empty
    )
    for _ in FileShardJournal(store, row.number).read(np.empty):
        pass


def _reason(error: Exception) -> str:
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
        bookkeeping=Budget(_ENDLESS, "bytes"),
    )
