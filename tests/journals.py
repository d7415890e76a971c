"""Journals for tests."""

import asyncio
from typing import Generic, TypeVar

from gradserve_server.errors import ServiceError

EventT = TypeVar("EventT")


class ListedJournal(Generic[EventT]):
    """Keeps events in a list; fails, or holds them up, when told to."""

    def __init__(self) -> None:
        self.events: list[EventT] = []
        self.failure: ServiceError | None = None
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def append(self, event: EventT) -> None:
        await self.go_on.wait()
        if self.failure is not None:
            raise self.failure
        self.events.append(event)
