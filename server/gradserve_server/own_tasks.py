"""Work that nobody can cancel."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from gradserve_server.eager import Begun

T = TypeVar("T")


class OwnTasks:
    """Work that continues when its caller is cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Does some work, of which only the rest needs a task, if there is any."""
        begun = Begun(work)
        return begun.result() if begun.is_done else await asyncio.shield(self.begin(begun.rest()))

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begins some work. Nobody has to wait for it, nor look at its error."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_retrieve)
        return task


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Retrieves an exception for which nobody may be waiting."""
    if not done.cancelled():
        done.exception()
