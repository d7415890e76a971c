"""Journals for tests: in memory, beside real accumulators and layers."""

import asyncio
from typing import Any, Generic, TypeVar

from gradserve_server.errors import ServiceError
from gradserve_server.storage.journal import Durability, Journals

EventT = TypeVar("EventT")


class EventJournal(Generic[EventT]):
    """Takes the events of an accumulator or a layer, and no values."""

    shard = None

    async def append(self, event: EventT) -> None:
        raise NotImplementedError

    async def accept(self, event: EventT, gradient: object) -> None:
        await self.append(event)

    async def reserve(self, num_bytes: int) -> None: ...
    async def settle(self, average: object, answered: object, seen: object = None) -> None: ...
    def forget(self, rounds: object) -> None: ...
    def begin(self, lifetime: Any) -> None: ...
    def close(self) -> None: ...


class OneJournal:
    """Stands for the journals of a server whose accumulators, or layers, have one journal."""

    default = Durability.NONE
    newest_number = 0

    def __init__(self, journal: EventJournal[Any]) -> None:
        self._journal = journal

    def begin(self, *_: object) -> Any:
        return self._journal

    journal = begin

    def end(self, key: object) -> None: ...
    def note_number(self, number: int) -> None: ...
    async def settle(self) -> None: ...


async def snapshots_written(journals: Journals[Any, Any]) -> None:
    """Waits for snapshots that are being made."""
    while journals._tasks._tasks:
        await asyncio.wait(journals._tasks._tasks)
    await journals.store.flush()


class ListedJournal(EventJournal[EventT]):
    """Keeps events in a list; fails, or holds them up, when told to.

    Attributes:
        events: Those that it let take effect.
        failure: What it raises instead.
        begun: Set when an event has arrived.
        go_on: Cleared to hold events up.
    """

    def __init__(self, num_turns: int = 0) -> None:
        """Takes the turns of the loop that an event is held up anyway."""
        self.num_turns = num_turns
        self.events: list[EventT] = []
        self.failure: ServiceError | None = None
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def append(self, event: EventT) -> None:
        self.begun.set()
        await self.go_on.wait()
        for _ in range(self.num_turns):
            await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        self.events.append(event)

    async def hold(self) -> None:
        """Waits for the next event, and holds it up."""
        self.begun.clear()
        self.go_on.clear()
        await self.begun.wait()
