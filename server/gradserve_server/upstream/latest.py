"""The newest average of an accumulator at an aggregator, and averages that several readers wait for."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable

from gradserve_server.accumulators.gradient import Average
from gradserve_server.own_tasks import OwnTasks


class LatestAverage:
    """Keeps the newest average that has come from upstream, so that all readers here cost one download.

    Used on the event loop only.
    """

    def __init__(self, tasks: OwnTasks) -> None:
        """Takes what runs downloads that several wait for."""
        self._tasks = tasks
        self._average: Average | None = None
        self._reading: dict[Hashable, tuple[asyncio.Task[Average], list[None]]] = {}

    def note(self, average: Average) -> None:
        """Keeps an average, unless a newer one is there."""
        if self._average is None or average.round_number >= self._average.round_number:
            self._average = average

    def find(self, step: int | None, num_rounds: int) -> Average | None:
        """Returns the average of a step, None for the newest, if it is of the last of `num_rounds` rounds and here."""
        average = self._average
        if average is None or average.round_number != num_rounds - 1 or step not in (None, average.step):
            return None
        return average

    async def shared(self, key: Hashable, read: Callable[[], Awaitable[Average]], timeout: float | None) -> Average:
        """Reads an average once for all who ask for it by the same key at the same time.

        Args:
            key: Says what is read.
            read: Reads it, however long that takes; cancelled when nobody waits for it any more.
            timeout: Seconds to wait; None for no limit.

        Raises:
            TimeoutError: It did not come in time.
            ServiceError: It cannot be read.
        """
        if key not in self._reading:
            self._reading[key] = self._tasks.begin(self._read(read)), []
        task, readers = self._reading[key]
        readers.append(None)
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(task)
        finally:
            readers.pop()
            if not readers:
                if self._reading.get(key, (None,))[0] is task:
                    del self._reading[key]
                task.cancel()

    async def _read(self, read: Callable[[], Awaitable[Average]]) -> Average:
        average = await read()
        self.note(average)
        return average
