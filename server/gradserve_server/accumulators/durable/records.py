"""The accumulators of a state directory: creates their journals, and restores them when a server starts."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.durable.journal import FileJournal
from gradserve_server.accumulators.durable.serialization import (
    average_of,
    joined,
    ledger_of,
    ledger_record,
    spec_of,
    spec_record,
)
from gradserve_server.accumulators.events import contribution_of, from_record
from gradserve_server.accumulators.gradient import Average, Gradient
from gradserve_server.accumulators.identity import CallMemory, RequestId
from gradserve_server.accumulators.journal import AccumulatorJournal, MemoryJournal
from gradserve_server.accumulators.ledger import Answer, Ledger
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.cluster import MisplacedError
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.security.identity import owner_named
from gradserve_server.storage.database import UNREADABLE, reading_database
from gradserve_server.storage.directory import DAMAGES, DamagedError, StateError
from gradserve_server.storage.journal import Durability, NoJournal
from gradserve_server.storage.segments import Allocate
from gradserve_server.storage.store import Change, StateStore

_log = logging.getLogger(__name__)

_MOST_EVENTS = 20_000
"""The number of events after which they are replaced by the ledger."""
INCOMING = ""
"""The container, in the database, of accumulators that have arrived with a change of the number of servers which is
not decided yet. Their names are whole keys; all other containers have names."""
RESIZED = (
    "accumulators have come here with a change of the number of servers that has not ended: start the cluster with "
    "`gradserve cluster up`, which ends it"
)
"""The reason for which a server refuses a directory with such accumulators."""


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


class FileRecords:
    """The journals of accumulators in a state directory."""

    def __init__(self, store: StateStore, default: Durability) -> None:
        self.default = default
        self._store = store
        self._registry: AccumulatorRegistry | None = None
        self._journals: dict[ResourceKey, FileJournal] = {}
        self._last_number = max((number for (number,) in store.rows("SELECT id FROM accumulator")), default=0)
        self.newest_number = newest_number(store)
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(
        self, key: ResourceKey, spec: AccumulatorSpec, lifetime: Lifetime, incarnation: str
    ) -> AccumulatorJournal:
        """Returns the journal of a new accumulator; in memory if nothing of it is to survive."""
        assert spec.durability is not None, "the registry has chosen one"
        if spec.durability is Durability.NONE:
            return MemoryJournal(NoJournal())
        self._last_number += 1
        change = Change()
        change.execute(
            "INSERT INTO accumulator (id, container, name, owner, incarnation, durability, spec, lifetime) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            self._last_number,
            key.container,
            key.name,
            key.user.name,
            incarnation,
            spec.durability.value,
            json.dumps(spec_record(spec)),
            json.dumps(asdict(lifetime)),
        )
        self._store.add(change)
        journal = FileJournal(self._store, self._last_number, spec.durability, on_round=self._shorten)
        self._journals[key] = journal
        return journal

    def end(self, key: ResourceKey) -> None:
        """Removes everything that is recorded of a deleted accumulator."""
        journal = self._journals.pop(key, None)
        if journal is not None:
            journal.end()

    def note_number(self, number: int) -> None:
        """Records the number of a new incarnation."""
        self._store.add(number_change(number))

    async def settle(self) -> None:
        """Returns once everything is on disk."""
        await self._store.flush()

    # Recovery

    async def restore(self, registry: AccumulatorRegistry, allocate: Allocate) -> int:
        """Restores all accumulators of the state directory; returns their number.

        Args:
            registry: Gets the accumulators.
            allocate: Allocates memory for their values.

        Raises:
            DamagedError: Something is damaged.
            StateError: An accumulator belongs to another server, or to a cluster of another size.
            ResourceExhaustedError: They exceed the limits of the server.
        """
        self._registry = registry
        rows = [self._row(*each) for each in self._store.rows(SELECT_ACCUMULATORS)]
        for row in rows:
            try:
                calls = registry.new_call_memory(registry.bookkeeping_of(row.key))
                averages = (average_in(self._store, allocate, *each) for each in average_rows(self._store, row.number))
                made = await make_again(self._store, row, registry, calls, self._journal_of(row), averages, allocate)
                if made.shard is not None:
                    for part in self._journals[row.key].shard.read(allocate):
                        await made.shard.stage_again(*part)
            except ResourceExhaustedError:
                raise
            except MisplacedError as error:
                raise StateError(
                    f"{self._store.path}: {error}; the directory is whole: start each server on its own directory, and "
                    "as many of them as there were, or change their number with `gradserve cluster resize`"
                ) from error
            except DAMAGES as error:
                raise self._damaged(row.key, error) from error
        return len(rows)

    def _journal_of(self, row: StoredAccumulator) -> Callable[[int], FileJournal]:
        """Returns a function that makes the journal of a restored accumulator, given its latest position."""
        assert row.spec.durability is not None, "the row was checked"
        durability = row.spec.durability

        def journal(position: int) -> FileJournal:
            gradients = self._store.rows(
                "SELECT blob FROM gradient WHERE accumulator = ? ORDER BY position", row.number
            )
            averages = self._store.rows("SELECT round, blob FROM average WHERE accumulator = ?", row.number)
            made = self._journals[row.key] = FileJournal(
                self._store,
                row.number,
                durability,
                position=position,
                gradients=[blob for (blob,) in gradients],
                averages=dict(averages),
                on_round=self._shorten,
            )
            return made

        return journal

    def _row(self, number: int, container: str, name: str, *columns: str) -> StoredAccumulator:
        if container == INCOMING:
            raise StateError(f"{self._store.path}: {RESIZED}")
        try:
            return StoredAccumulator.of_row(number, container, name, *columns)
        except DAMAGES as error:
            raise self._damaged(ResourceKey(container, name), error) from error

    def _damaged(self, key: ResourceKey, error: Exception) -> DamagedError:
        return DamagedError(
            f"{self._store.path}: the record of accumulator {str(key)!r} cannot be used: {error}: restore the "
            f"directory from a backup, or see what `gradserve state repair {self._store.path}` would remove"
        )

    # Shorter journals

    def _shorten(self, journal: FileJournal) -> None:
        """Replaces the events of an accumulator by the ledger that they led to, if there are many."""
        if journal.num_events < _MOST_EVENTS:
            return
        journal.num_events = 0
        task = asyncio.get_running_loop().create_task(self._write_ledger(journal.number, journal.position))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write_ledger(self, number: int, position: int) -> None:
        try:
            record = await asyncio.to_thread(self._read_ledger, number, position)
        except (*UNREADABLE, *DAMAGES) as error:
            _log.error("the journal of accumulator %d in %s grows: %s", number, self._store.path, error)
            return
        if record is None:
            return
        change = Change()
        change.execute(
            # An older ledger, whose thread took longer, must not take the place of a newer one: its events are gone.
            "INSERT INTO ledger (accumulator, position, record) SELECT id, ?, ? FROM accumulator WHERE id = ? "
            "ON CONFLICT (accumulator) DO UPDATE SET position = excluded.position, record = excluded.record "
            "WHERE excluded.position > ledger.position",
            position,
            record,
            number,
        )
        change.execute("DELETE FROM event WHERE accumulator = ? AND position <= ?", number, position)
        self._store.add(change)

    def _read_ledger(self, number: int, position: int) -> str | None:
        """Returns the record of the ledger at a position; None if the accumulator was deleted."""
        assert self._registry is not None, "restore comes first"
        # Short-lived and in another thread, so it counts in no budget.
        calls = self._registry.new_call_memory(Budget(1 << 62, "bytes"))
        with reading_database(self._store.database) as connection:

            def rows(query: str, *values: Any) -> list[tuple[Any, ...]]:
                return connection.execute(query, values).fetchall()

            if not rows("SELECT id FROM accumulator WHERE id = ?", number):
                return None
            ledger, _ = read_ledger(rows, number, calls, position)
            return json.dumps(ledger_record(ledger))


SELECT_ACCUMULATORS = "SELECT id, container, name, owner, incarnation, spec, lifetime FROM accumulator ORDER BY id"


async def make_again(
    store: StateStore,
    row: StoredAccumulator,
    registry: AccumulatorRegistry,
    calls: CallMemory[Answer],
    journal_of: Callable[[int], AccumulatorJournal],
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
    ledger, position = read_ledger(store.rows, row.number, calls)
    journal = journal_of(position)
    accumulator = registry.restore(row.key, row.spec, row.lifetime, row.incarnation, ledger, journal)
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


def average_rows(store: StateStore, number: int) -> list[tuple[Any, ...]]:
    """Returns the rows of the averages of an accumulator: round, record, names and blob, by round."""
    return store.rows("SELECT round, record, names, blob FROM average WHERE accumulator = ? ORDER BY round", number)


def average_in(
    store: StateStore, allocate: Allocate, number: int, record: str, names: str, blob: int
) -> tuple[Average, list[RequestId]]:
    """Returns the average of a row, and the calls that it answered.

    Raises:
        StateError: Its values cannot be read.
        DAMAGES: Its record is damaged.
    """
    average, answered = average_of(json.loads(record), joined(json.loads(names), store.read(blob, allocate)))
    if average.round_number != number:
        raise ValueError(f"expected the average of round {number}, got that of round {average.round_number}")
    return average, answered


def read_ledger(
    rows: Callable[..., list[tuple[Any, ...]]],
    number: int,
    calls: CallMemory[Answer],
    end: int = (1 << 63) - 1,
) -> tuple[Ledger, int]:
    """Returns the ledger of an accumulator, and the position of the latest event in it.

    Args:
        rows: Returns the rows of a query.
        number: The number of the accumulator.
        calls: An empty memory of calls, for the ledger.
        end: The position of the latest event to apply.

    Raises:
        ServiceError, ValueError, TypeError, KeyError: A record is damaged.
    """
    ledger, position = Ledger(calls), 0
    for found, record in rows("SELECT position, record FROM ledger WHERE accumulator = ?", number):
        ledger, position = ledger_of(json.loads(record), calls), found
    events = rows(
        "SELECT position, record FROM event WHERE accumulator = ? AND position > ? AND position <= ? ORDER BY position",
        number,
        position,
        end,
    )
    for _, record in events:
        ledger.replay(from_record(json.loads(record)))
    return ledger, events[-1][0] if events else position


def newest_number(store: StateStore) -> int:
    """Returns the number of the newest incarnation that is recorded; 0 if there is none."""
    ((found,),) = store.rows("SELECT coalesce(max(number), 0) FROM newest_incarnation")
    return int(found)


def number_change(number: int) -> Change:
    """Returns the change that records the number of an incarnation, unless a greater one is recorded."""
    change = Change()
    change.execute(
        "INSERT INTO newest_incarnation (place, number) VALUES (0, ?) "
        "ON CONFLICT (place) DO UPDATE SET number = max(number, excluded.number)",
        number,
    )
    return change


def _check_sum(accumulator: Accumulator, num_gradients: int) -> None:
    expected = accumulator.num_accumulated
    if num_gradients != expected:
        raise ValueError(f"expected {expected} gradients of the current round, got {num_gradients}")
