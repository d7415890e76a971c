"""The journals of durable accumulators and of their shards in a state directory."""

import asyncio
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from gradserve_server.accumulators.gradient import Average, Gradient, Value
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.ledger import Event, GradientAnswered, Ledger, StepSet
from gradserve_server.accumulators.records import (
    ACCUMULATORS,
    average_record,
    contribution_record,
    joined,
    spec_record,
    split,
)
from gradserve_server.accumulators.rounds import KEPT_ROUNDS, SeenRound
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.journal import Durability, Journal, Journals, Recording, record_of, value_of
from gradserve_server.storage.segments import Allocate
from gradserve_server.storage.store import Change, Space, StateStore


class AccumulatorJournal(Protocol):
    """Takes every change of one accumulator, in order, before it takes effect."""

    async def append(self, event: Event) -> None:
        """Returns once an event may take effect.

        If this raises or the task is cancelled, the event has no effect: nothing has changed, and it is not replayed.
        """
        ...

    async def accept(self, event: GradientAnswered, gradient: Gradient) -> asyncio.Future[None] | None:
        """Appends an event that accepts a gradient, with its values.

        Returns:
            A future that is done when the gradient may be acknowledged; None if it may be now. The gradient must not
            change until then. If the future fails, nobody may see an effect of the event: the server stops.
        """
        ...

    async def reserve(self, num_bytes: int) -> None:
        """Reserves space for the average of a round that is about to end.

        Raises:
            ServiceError: There is no space; nothing has changed.
        """
        ...

    async def settle(self, average: Average, answered: Sequence[RequestId], seen: SeenRound | None = None) -> None:
        """Returns when others may see that a round has ended. If this raises, nobody ever may: the server stops.

        Args:
            average: The result of the round.
            answered: The calls that it answers.
            seen: What to keep of the round for the status of later runs.
        """
        ...


class PartKey(NamedTuple):
    """Names a gradient that servers hold for a round of a sharded accumulator.

    Attributes:
        home_incarnation: The incarnation of the accumulator at its home.
        id: The id of the gradient; see `part_id`.
    """

    home_incarnation: str
    id: str


class Staged(NamedTuple):
    """Describes a staged gradient.

    Attributes:
        epoch: The epoch of the accumulator at its home, the only one in which the gradient may count; None: any.
        local_step: The step at which the gradient was computed.
    """

    epoch: int | None
    local_step: int


class ShardJournal:
    """The journal of a shard. Writes each gradient before it is acknowledged, as the home may count it from then on."""

    def __init__(self, store: StateStore, number: int, tables: "RoundTables | None" = None) -> None:
        """`tables` are those of accumulators unless they are given."""
        tables = FileJournal.tables if tables is None else tables
        self._table, self._where = tables.parts, f"{tables.resource} = ? AND home = ? AND id = ?"
        self._resource = tables.resource
        self._store = store
        self._number = number
        self._blobs: dict[PartKey, int] = {}
        self._ended = False

    async def accept(self, key: PartKey, staged: Staged, gradient: Gradient) -> asyncio.Future[None] | None:
        """Writes a gradient.

        Returns:
            A future that is done when the gradient may be acknowledged; None if it may be now. The gradient must not
            change until then.

        Raises:
            ServiceError: There is no space; nothing has changed.
        """
        space = await self._store.reserve(gradient.nbytes)
        if self._ended or key in self._blobs:
            self._store.give_back(space)
            return None
        change = Change()
        blob, layout = put_values(self._store, change, gradient.values, space, live=gradient.live)
        self._blobs[key] = blob
        change.execute(
            f"INSERT INTO {self._table} ({self._resource}, home, id, epoch, local_step, names, blob) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            *(self._number, *key, *staged, layout, blob),
        )
        return self._store.submit(change)

    def stage_again(self, key: PartKey, epoch: int) -> asyncio.Future[None] | None:
        """Writes the later epoch of a gradient that was staged again; returns a future as `accept` does."""
        if self._ended or key not in self._blobs:
            return None
        change = Change()
        change.execute(f"UPDATE {self._table} SET epoch = ? WHERE {self._where}", epoch, self._number, *key)
        return self._store.submit(change)

    def forget(self, keys: Collection[PartKey]) -> None:
        """Removes gradients that no round needs any more."""
        known = [key for key in dict.fromkeys(keys) if key in self._blobs]
        if not known or self._ended:
            return
        change = Change()
        for key in known:
            change.execute(f"DELETE FROM {self._table} WHERE {self._where}", self._number, *key)
        change.remove([self._blobs.pop(key) for key in known])
        self._store.add(change)

    def end(self) -> list[int]:
        """Stops writing, as the accumulator was deleted; returns the blobs to remove."""
        self._ended = True
        blobs, self._blobs = list(self._blobs.values()), {}
        return blobs

    def read(self, allocate: Allocate) -> Iterator[tuple[PartKey, Staged, Gradient]]:
        """Yields the gradients held by an earlier run of the server, with their descriptions.

        Raises:
            StateError: Something is damaged.
            ValueError, TypeError, KeyError: A record is damaged.
        """
        rows = self._store.rows(
            f"SELECT home, id, epoch, local_step, names, blob FROM {self._table} WHERE {self._resource} = ? "
            "ORDER BY blob",
            self._number,
        )
        for home, part_id, epoch, local_step, names, blob in rows:
            key = PartKey(home, part_id)
            self._blobs[key] = blob
            values = joined(json.loads(names), self._store.read(blob, allocate))
            yield key, Staged(epoch, local_step), Gradient(values, owned=True, finite=frozenset(values))


class RoundTables(NamedTuple):
    """The tables of the values of one kind of resource that works in rounds.

    Attributes:
        resource: The table of the resources, and the column that refers to it in the others.
        gradients: The table of the gradients of rounds that have not ended.
        averages: The table of the results of rounds.
        parts: The table of what shards hold of gradients.
        seen: The table of what was seen of the last rounds; empty for a resource whose rounds have records of their
            own.
        states: The table of the states of optimizers; empty for a resource without one.
    """

    resource: str
    gradients: str
    averages: str
    parts: str
    seen: str = ""
    states: str = ""


_MOST_NOTED = 4096
"""The most events that wait for the end of their round, at level GRADIENT."""


class FileJournal(Journal[Event]):
    """The journal of an accumulator. Writes what its durability asks for, and no earlier than necessary.

    With ROUND, the events of a round are written when it ends, together with its average: a crash before that leaves
    nothing of its gradients, so their senders can send them again. With GRADIENT, each gradient is written at once.

    Attributes:
        shard: The journal of this server's shard, if the accumulator is sharded.
        tables: The tables of values.
    """

    tables: ClassVar[RoundTables] = RoundTables("accumulator", "gradient", "average", "part", "accumulator_round")

    def __init__(
        self,
        journals: "Journals[Event, Any]",
        number: int,
        durability: Durability,
        *,
        position: int = 0,
        gradients: Sequence[int] = (),
        averages: Mapping[int, int] | None = None,
    ) -> None:
        """Takes the present contents of the state directory.

        Args:
            journals: Those of the server.
            number: The number of the accumulator in the state directory.
            durability: Its durability; not NONE.
            position: The position of its latest event.
            gradients: The blobs of the gradients of the current round.
            averages: The blobs of the averages, by round.
        """
        super().__init__(journals, number, position)
        self._durability = durability
        self._gradients = list(gradients)
        self._averages = dict(averages or {})
        self._space: Space | None = None
        self.shard = ShardJournal(self.store, number, self.tables)

    async def append(self, event: Event) -> None:
        """Notes an event for the next write; a new step is on disk when this returns."""
        if self.has_ended:
            return
        if isinstance(event, StepSet):
            await self._set_step(event)
            return
        self.note(event)
        if self.num_noted > _MOST_NOTED and self._durability is Durability.GRADIENT:
            self.store.add(self.change())

    async def _set_step(self, event: StepSet) -> None:
        """Writes a new step, together with all that it drops: a crash leaves both or neither."""
        # A round that is dropped was not written at ROUND, and is to be known all the same.
        change = self.change() if event.drops_round else Change()
        self.write(change, event)
        averages, gradients = self._take(event.abandoned), self._gradients
        self._remove(change, averages)
        if event.drops_round:
            self._remove_gradients(change)
        try:
            await self.store.commit(change)
        except BaseException:
            self._averages |= averages
            self._gradients = gradients
            raise
        self.shorten()

    async def accept(self, event: GradientAnswered, gradient: Gradient) -> asyncio.Future[None] | None:
        """Writes a gradient with its event, at level GRADIENT; otherwise notes the event alone."""
        if self._durability is not Durability.GRADIENT:
            await self.append(event)
            return None
        space = await self.store.reserve(gradient.nbytes)
        if self.has_ended:
            self.store.give_back(space)
            return None
        change = self.change()
        self.write(change, event)
        blob, layout = put_values(self.store, change, gradient.values, space, live=gradient.live)
        change.execute(
            f"INSERT INTO {self.tables.gradients} ({self.tables.resource}, position, contribution, names, blob) "
            "VALUES (?, ?, ?, ?, ?)",
            *(self.number, self.position, json.dumps(contribution_record(event.contribution)), layout, blob),
        )
        self._gradients.append(blob)
        return self.store.submit(change)

    async def reserve(self, num_bytes: int) -> None:
        """Reserves disk space for the average of a round that is about to end."""
        space = await self.store.reserve(num_bytes)
        if self.has_ended:
            self.store.give_back(space)  # the accumulator was deleted in the meantime
            return
        self._give_back_space()  # of a round that did not end
        self._space = space

    async def settle(self, average: Average, answered: Sequence[RequestId], seen: SeenRound | None = None) -> None:
        """Writes an average with all noted events, in place of the gradients of its round."""
        if self.has_ended:
            return
        change = self.change()
        if seen is not None and self.tables.seen:
            self._keep_seen(change, average.round_number, seen)
        self.add_result(change, average, answered)
        self._remove_gradients(change)
        await self.store.commit(change)
        self.shorten()

    def _keep_seen(self, change: Change, round_number: int, seen: SeenRound) -> None:
        """Adds what was seen of a round to a change, in place of the round that is too old now."""
        table, resource = self.tables.seen, self.tables.resource
        change.execute(
            f"INSERT INTO {table} ({resource}, round, record) VALUES (?, ?, ?)",
            *(self.number, round_number, json.dumps(record_of(seen, {}))),
        )
        change.execute(
            f"DELETE FROM {table} WHERE {resource} = ? AND round <= ?", self.number, round_number - KEPT_ROUNDS
        )

    def add_result(self, change: Change, average: Average, answered: Sequence[RequestId]) -> None:
        """Adds the result of a round to a change."""
        space, self._space = self._space, None
        blob, layout = put_values(self.store, change, average.values, space)
        tables = self.tables
        change.execute(
            f"INSERT INTO {tables.averages} ({tables.resource}, round, record, names, blob) VALUES (?, ?, ?, ?, ?)",
            *(self.number, average.round_number, json.dumps(average_record(average, answered)), layout, blob),
        )
        self._averages[average.round_number] = blob

    def forget(self, rounds: Collection[int]) -> None:
        """Removes the averages of rounds that are no longer kept."""
        known = self._take(rounds)
        if not known or self.has_ended:
            return
        change = Change()
        self._remove(change, known)
        self.store.add(change)

    def end(self) -> Change:
        """Ends the journal; returns the change that removes everything of the deleted accumulator."""
        change = super().end()
        self._give_back_space()
        change.remove([*self._gradients, *self._averages.values(), *self.shard.end()])
        self._gradients, self._averages = [], {}
        return change

    def _remove_gradients(self, change: Change) -> None:
        """Adds the removal of the gradients of the round to a change, and forgets them."""
        change.execute(f"DELETE FROM {self.tables.gradients} WHERE {self.tables.resource} = ?", self.number)
        change.remove(self._gradients)
        self._gradients = []

    def _take(self, rounds: Collection[int]) -> dict[int, int]:
        """Returns the blobs of the averages of rounds, and forgets them."""
        return {number: self._averages.pop(number) for number in rounds if number in self._averages}

    def _remove(self, change: Change, averages: Mapping[int, int]) -> None:
        """Adds the removal of averages to a change."""
        for number in averages:
            change.execute(
                f"DELETE FROM {self.tables.averages} WHERE {self.tables.resource} = ? AND round = ?",
                *(self.number, number),
            )
        change.remove(averages.values())

    def _give_back_space(self) -> None:
        space, self._space = self._space, None
        if space is not None:
            self.store.give_back(space)


def seen_rounds(store: StateStore, number: int) -> list[SeenRound]:
    """Returns what was seen of the last rounds of an accumulator, the oldest first.

    Raises:
        DAMAGES: A record is damaged.
    """
    rows = store.rows("SELECT record FROM accumulator_round WHERE accumulator = ? ORDER BY round", number)
    return [value_of(SeenRound, json.loads(record), {}) for (record,) in rows]


def put_values(
    store: StateStore, change: Change, values: Mapping[str, Value], space: Space | None = None, *, live: bool = False
) -> tuple[int, str]:
    """Adds values to a change as a new blob; see `Change.put`. Returns the blob, and the layout as JSON."""
    blob = store.new_blob()
    layout, arrays = split(values)
    change.put(blob, arrays, space, live=live)
    return blob, json.dumps(layout)


StateT = TypeVar("StateT")
JournalT = TypeVar("JournalT", bound=FileJournal)


class RoundJournals(Journals[Any, StateT], Generic[StateT, JournalT]):
    """The journals of everything of one kind that has rounds, by its name."""

    def __init__(self, store: StateStore, recording: Recording[Any, StateT], default: Durability) -> None:
        super().__init__(store, recording, default)
        self._journals: dict[ResourceKey, JournalT] = {}

    def of(self, key: ResourceKey) -> JournalT:
        """Returns the journal of a resource that has one."""
        return self._journals[key]

    def end(self, key: ResourceKey) -> None:
        """Removes everything that is recorded of a deleted resource."""
        journal = self._journals.pop(key, None)
        if journal is not None:
            self.store.add(journal.end())


class AccumulatorJournals(RoundJournals[Ledger, FileJournal]):
    """The journals of a server's durable accumulators.

    Attributes:
        newest_number: The number of the newest incarnation that earlier runs have recorded; 0 if there is none.
    """

    def __init__(self, store: StateStore, default: Durability) -> None:
        super().__init__(store, ACCUMULATORS, default)
        self.newest_number = newest_number(store)

    def begin(
        self, key: ResourceKey, spec: AccumulatorSpec, lifetime: Lifetime, incarnation: str
    ) -> FileJournal | None:
        """Returns the journal of a new accumulator, whose spec has its durability; None for NONE."""
        assert spec.durability is not None, "the registry has chosen one"
        if spec.durability is Durability.NONE:
            return None
        number = self.new_number()
        change = Change()
        change.execute(
            "INSERT INTO accumulator (id, container, name, owner, incarnation, durability, spec, lifetime) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            *(number, key.container, key.name, key.user.name, incarnation, spec.durability.value),
            *(json.dumps(spec_record(spec)), json.dumps(asdict(lifetime))),
        )
        self.store.add(change)
        journal = self._journals[key] = FileJournal(self, number, spec.durability)
        return journal

    def begin_again(self, key: ResourceKey, number: int, durability: Durability, position: int) -> FileJournal:
        """Returns the journal of a restored accumulator, given the position of its latest event."""
        gradients = self.store.rows("SELECT blob FROM gradient WHERE accumulator = ? ORDER BY position", number)
        averages = dict(self.store.rows("SELECT round, blob FROM average WHERE accumulator = ?", number))
        journal = self._journals[key] = FileJournal(
            self,
            number,
            durability,
            position=position,
            gradients=[blob for (blob,) in gradients],
            averages=averages,
        )
        return journal

    def note_number(self, number: int) -> None:
        """Records the number of a new incarnation, durably once `settle` has returned."""
        self.store.add(number_change(number))


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
