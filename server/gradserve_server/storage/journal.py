"""Durable resources: their events, the snapshots that replace old events, and the window of the latest ids.

A durable resource declares a `Recording`: its tables, its events and its state as records, and how an event changes
the state. Its `Journal` then writes each event before it takes effect; its `Journals` creates the journals of a server
and keeps them short. A resource that is not durable has None in place of a journal.
"""

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Generic, TypeAlias, TypeVar

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.runtime.event_loop import BackgroundTasks
from gradserve_server.storage.database import UNREADABLE, reading_database
from gradserve_server.storage.directory import DAMAGES, DamagedError
from gradserve_server.storage.store import Change, StateStore

_log = logging.getLogger(__name__)

MOST_EVENTS = 20_000
"""The number of events after which a snapshot replaces them."""
_NO_END = (1 << 63) - 1

INCOMING = ""
"""The container, in the database, of accumulators and parameters that have arrived with a change of the number of
servers which is not decided yet. Their names are whole keys; all other containers have names."""
RESIZED = (
    "accumulators or parameters have come here with a change of the number of servers that has not ended: start the "
    "cluster with `gradserve cluster up`, which ends it"
)
"""The reason for which a server refuses a directory with such resources."""


class Durability(Enum):
    """The changes that survive a crash or a loss of power; see the enum of the protos."""

    NONE = "NONE"
    """Nothing."""
    ROUND = "ROUND"
    """Rounds that have ended, from before anybody learns of their end."""
    GRADIENT = "GRADIENT"
    """Gradients, too, from before their senders learn that they count."""


EventT = TypeVar("EventT")
StateT = TypeVar("StateT")
ValueT = TypeVar("ValueT")

Record: TypeAlias = dict[str, Any]
"""An event or a state in types that JSON has."""
Converters: TypeAlias = Mapping[str, Callable[[Any], Any]]
"""Convert values of fields, by the name of the field."""


def record_of(value: Any, converters: Converters) -> Record:
    """Converts a dataclass to a record; the reverse of `value_of`. Enums become their values."""
    return {each.name: converters.get(each.name, _plain)(getattr(value, each.name)) for each in fields(value)}


def value_of(kind: type[ValueT], record: Record, converters: Converters) -> ValueT:
    """Converts a record to a dataclass. Lists become tuples; fields that are missing have their defaults.

    Raises:
        DAMAGES: It is no such record.
    """
    return kind(**{name: converters.get(name, _value)(found) for name, found in record.items()})


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _value(found: Any) -> Any:
    return tuple(found) if isinstance(found, list) else found


class EventRecords(Generic[EventT]):
    """Converts the events of one kind of resource, which are dataclasses, to records."""

    def __init__(self, kinds: Mapping[str, type[EventT]], to_record: Converters, of_record: Converters) -> None:
        """`kinds` has the names of events in records; the converters are those of fields whose values JSON lacks."""
        self._kinds = kinds
        self._names = {kind: name for name, kind in kinds.items()}
        self._to_record = to_record
        self._of_record = of_record

    def has(self, kind: type[object]) -> bool:
        """Returns True if these are the records of a kind of event."""
        return kind in self._names

    def knows(self, name: str) -> bool:
        """Returns True if a kind of event has this name in records."""
        return name in self._kinds

    def record(self, event: EventT) -> Record:
        """Converts an event to a record."""
        return {"event": self._names[type(event)], **record_of(event, self._to_record)}

    def event(self, record: Record) -> EventT:
        """Converts a record to an event.

        Raises:
            DAMAGES: It is not the record of a known event.
        """
        rest = dict(record)
        name = rest.pop("event")
        if name not in self._kinds:
            raise ValueError(f"expected a known event, got {name!r}")
        return value_of(self._kinds[name], rest, self._of_record)


Rows: TypeAlias = Callable[..., list[tuple[Any, ...]]]
"""Returns the rows of a query, given its values."""


@dataclass(frozen=True)
class Recording(Generic[EventT, StateT]):
    """The tables and records of one kind of resource in a state directory.

    The same events in the same order, applied to an empty state, give the same state.

    Attributes:
        resource: The table of the resources, and the column that refers to it in the other tables.
        events: The table of events.
        snapshots: The table of snapshots, one for each resource: the state that its events up to a position lead to.
        event_record: Converts an event to a record.
        event_of: Converts a record to an event.
        state_record: Converts a state to a record.
        fill_state: Fills an empty state from a record.
        apply: Applies an event to a state.
    """

    resource: str
    events: str
    snapshots: str
    event_record: Callable[[EventT], Record]
    event_of: Callable[[Record], EventT]
    state_record: Callable[[StateT], Record]
    fill_state: Callable[[StateT, Record], object]
    apply: Callable[[StateT, EventT], object]

    def replay(self, rows: Rows, number: int, state: StateT, end: int = _NO_END) -> int:
        """Brings an empty state to where the events of a resource lead; returns the position of the latest event.

        Args:
            rows: Reads the state directory.
            number: The number of the resource there.
            state: The empty state.
            end: The position of the latest event to apply.

        Raises:
            DAMAGES: A record is damaged.
        """
        position = 0
        snapshot = f"SELECT position, record FROM {self.snapshots} WHERE {self.resource} = ?"
        for found, record in rows(snapshot, number):
            position = found
            self.fill_state(state, json.loads(record))
        events = (
            f"SELECT position, record FROM {self.events} "
            f"WHERE {self.resource} = ? AND position > ? AND position <= ? ORDER BY position"
        )
        for found, record in rows(events, number, position, end):
            position = found
            self.apply(state, self.event_of(json.loads(record)))
        return position


class Journal(Generic[EventT]):
    """The journal of one resource in a state directory. Takes every event before it takes effect, in order.

    Attributes:
        store: The state directory.
        number: The number of the resource there.
        position: The position of the latest event.
        has_ended: Whether the resource was deleted. Nothing may be written from then on.
    """

    def __init__(self, journals: "Journals[EventT, Any]", number: int, position: int = 0) -> None:
        self.store = journals.store
        self.number = number
        self.position = position
        self.has_ended = False
        self._journals = journals
        self._recording = journals.recording
        self._num_events = 0
        """The events written since the last snapshot."""
        self._noted: list[tuple[int, EventT]] = []

    @property
    def num_noted(self) -> int:
        """The number of events that wait for the next `change`."""
        return len(self._noted)

    def note(self, event: EventT) -> None:
        """Takes an event that the next `change` writes."""
        self.position += 1
        self._noted.append((self.position, event))

    def change(self) -> Change:
        """Returns a change that writes the noted events."""
        change = Change()
        noted, self._noted = self._noted, []
        for position, event in noted:
            self._write_at(change, position, event)
        return change

    def write(self, change: Change, event: EventT) -> None:
        """Adds an event to a change, which may be written before noted events."""
        self.position += 1
        self._write_at(change, self.position, event)

    def _write_at(self, change: Change, position: int, event: EventT) -> None:
        self._num_events += 1
        change.execute(
            f"INSERT INTO {self._recording.events} ({self._recording.resource}, position, record) VALUES (?, ?, ?)",
            *(self.number, position, json.dumps(self._recording.event_record(event))),
        )

    def shorten(self) -> None:
        """Begins to replace the events by a snapshot if there are many. The store must have all that are not noted."""
        if self._num_events >= MOST_EVENTS:
            self._num_events = 0
            position = self._noted[0][0] - 1 if self._noted else self.position
            self._journals.begin_snapshot(self.number, position)

    def end(self) -> Change:
        """Ends the journal; returns the change that deletes the resource, but for its blobs."""
        self.has_ended = True
        self._noted = []
        change = Change()
        change.execute(f"DELETE FROM {self._recording.resource} WHERE id = ?", self.number)
        return change


class Journals(Generic[EventT, StateT]):
    """The journals of all resources of one kind in a state directory.

    Attributes:
        store: The state directory.
        recording: The kind.
        default: The durability of resources that ask for none.
        new_state: Returns an empty state that uses no budget of the server, to make snapshots with, in any thread.
    """

    new_state: Callable[[], StateT]

    def __init__(self, store: StateStore, recording: Recording[EventT, StateT], default: Durability) -> None:
        self.store = store
        self.recording = recording
        self.default = default
        ((self._last_number,),) = store.rows(f"SELECT coalesce(max(id), 0) FROM {recording.resource}")
        self._tasks = BackgroundTasks()

    def new_number(self) -> int:
        """Returns the number of a new resource."""
        self._last_number += 1
        return int(self._last_number)

    async def settle(self) -> None:
        """Returns once all changes so far are on disk, so that others may see them."""
        await self.store.flush()

    def damaged(self, key: object, error: Exception) -> DamagedError:
        """Returns the error for a resource whose records are damaged."""
        return DamagedError(
            f"{self.store.path}: the record of {self.recording.resource} {str(key)!r} cannot be used: {error}: "
            f"restore the directory from a backup, or see what `gradserve state repair {self.store.path}` would remove"
        )

    def empty_state(self, number: int, rows: Rows) -> StateT:
        """Returns the state of a resource before its first event, given a reader of the directory; in any thread."""
        return self.new_state()

    def begin_snapshot(self, number: int, position: int) -> "asyncio.Task[None]":
        """Begins to replace the events of a resource, up to a position, by the state that they lead to."""
        return self._tasks.begin(self._write_snapshot(number, position))

    async def _write_snapshot(self, number: int, position: int) -> None:
        try:
            await self.store.flush()
            record = await asyncio.to_thread(self._replay, number, position)
        except (*UNREADABLE, *DAMAGES) as error:
            _log.error("the journal of %s %d in %s grows: %s", self.recording.resource, number, self.store.path, error)
            return
        if record is not None:
            self.store.add(self.snapshot(number, position, record))

    def snapshot(self, number: int, position: int, record: str) -> Change:
        """Returns the change that replaces the events of a resource, up to a position, by the record of a state."""
        found = self.recording
        change = Change()
        change.execute(
            # An older snapshot, whose thread took longer, must not replace a newer one: its events are gone.
            f"INSERT INTO {found.snapshots} ({found.resource}, position, record) "
            f"SELECT id, ?, ? FROM {found.resource} WHERE id = ? "
            f"ON CONFLICT ({found.resource}) DO UPDATE SET position = excluded.position, record = excluded.record "
            f"WHERE excluded.position >= {found.snapshots}.position",
            *(position, record, number),
        )
        change.execute(f"DELETE FROM {found.events} WHERE {found.resource} = ? AND position <= ?", number, position)
        return change

    def _replay(self, number: int, position: int) -> str | None:
        """Returns the record of the state of a resource after its event at a position; None if it was deleted."""
        with reading_database(self.store.database) as connection:

            def rows(query: str, *values: Any) -> list[tuple[Any, ...]]:
                return connection.execute(query, values).fetchall()

            if not rows(f"SELECT id FROM {self.recording.resource} WHERE id = ?", number):
                return None
            state = self.empty_state(number, rows)
            self.recording.replay(rows, number, state, position)
        return json.dumps(self.recording.state_record(state))


def durability_of_new(asked: Durability | None, journals: Journals[Any, Any] | None, field: str) -> Durability:
    """Returns the durability of a new resource: the one that it asks for, or the server's default.

    Raises:
        InvalidArgumentError: It asks for more than NONE, and the server has no state directory.
    """
    if journals is not None:
        return asked or journals.default
    if asked not in (None, Durability.NONE):
        raise InvalidArgumentError(
            f"expected NONE, as the server has no state directory, got {asked.value}", field=field
        )
    return Durability.NONE


IdT = TypeVar("IdT", bound=Hashable)
RecordT = TypeVar("RecordT")


class IdWindow(OrderedDict[IdT, RecordT]):
    """A sliding window: remembers a record for each of the latest ids, oldest first, and forgets the oldest.

    Its contents depend only on the order of calls of `remember`, so the same events make the same window.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def remember(self, used_id: IdT, record: RecordT) -> list[IdT]:
        """Makes an id the latest, with this record; returns the forgotten ids."""
        self[used_id] = record
        self.move_to_end(used_id)
        forgotten = []
        while len(self) > self.size:
            forgotten.append(self.popitem(last=False)[0])
        return forgotten


def num_incoming(store: StateStore) -> int:
    """Returns the number of accumulators and parameters that have arrived with an unfinished change of the cluster."""
    ((count,),) = store.rows(
        "SELECT (SELECT count(*) FROM accumulator WHERE container = ?1) + "
        "(SELECT count(*) FROM parameters WHERE container = ?1)",
        INCOMING,
    )
    return int(count)
