"""Journals for tests."""

import asyncio
from typing import Generic, TypeVar

from gradserve_server.errors import ServiceError

EventT = TypeVar("EventT")


class ListedJournal(Generic[EventT]):
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
