"""The newest averages of accumulators at an aggregator, and averages that several readers wait for."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable

from gradserve_server.accumulators.gradient import Average
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.resources.budget import Budget, Purpose, Reservation
from gradserve_server.runtime.event_loop import BackgroundTasks


class LatestAverages:
    """The newest average of each accumulator, within the limit of memory: whatever else needs it comes first.

    They are kept only to be faster. So the one that was used the longest ago goes when a call finds too little memory.
    """

    def __init__(self, memory: Budget) -> None:
        self._memory = memory
        self._kept: OrderedDict[LatestAverage, tuple[Average, Reservation]] = OrderedDict()
        memory.spare.append(self._make_room)

    def keep(self, holder: "LatestAverage", average: Average) -> None:
        """Keeps an average in the place of the holder's one, if there is memory for it."""
        self.drop(holder)
        reservation = self._memory.reserve(purpose=Purpose.ACCUMULATORS)
        try:
            reservation.grow(average.nbytes)
        except ResourceExhaustedError:
            return
        self._kept[holder] = average, reservation

    def find(self, holder: "LatestAverage") -> Average | None:
        """Returns the average of a holder, if it is kept."""
        if holder not in self._kept:
            return None
        self._kept.move_to_end(holder)
        return self._kept[holder][0]

    def drop(self, holder: "LatestAverage") -> None:
        """Forgets the average of a holder."""
        if holder in self._kept:
            self._kept.pop(holder)[1].settle(0)

    def _make_room(self, amount: int) -> None:
        """Gives back `amount` of memory, or all there is."""
        while self._kept and amount > 0:
            _, (_, reservation) = self._kept.popitem(last=False)
            amount -= reservation.used
            reservation.settle(0)


class LatestAverage:
    """Keeps the newest average that has come from upstream, so that all readers here cost one download.

    Used on the event loop only.
    """

    def __init__(self, kept: LatestAverages, tasks: BackgroundTasks, epoch: int = 0) -> None:
        self._kept = kept
        self._epoch = epoch
        self._tasks = tasks
        self._newest_round = -1
        self._has_ended = False
        self._reading: dict[Hashable, tuple[asyncio.Task[Average], list[None]]] = {}

    def note(self, average: Average) -> None:
        """Keeps an average, unless a newer one has come."""
        if average.round_number >= self._newest_round and not self._has_ended:
            self._newest_round = average.round_number
            self._kept.keep(self, average)

    def end(self) -> None:
        """Keeps no average from now on, as the accumulator is gone."""
        self._has_ended = True
        self._kept.drop(self)

    def find(self, step: int | None, num_rounds: int, epoch: int) -> Average | None:
        """Returns the average of a step, None for the newest, if it is of the last of `num_rounds` rounds and here.

        In another epoch, the step may have been set back since, which drops averages.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            self._kept.drop(self)
        average = self._kept.find(self)
        if average is None or average.round_number != num_rounds - 1 or step not in (None, average.step):
            return None
        return average

    async def shared(
        self, key: Hashable, read: Callable[[], Awaitable[Average]], timeout: float | None, *, keep: bool = True
    ) -> Average:
        """Reads an average once for all who ask for it by the same key at the same time.

        Args:
            key: Says what is read.
            read: Reads it, however long that takes; cancelled when nobody waits for it any more.
            timeout: Seconds to wait; None for no limit.
            keep: Whether to keep it if it is the newest one.

        Raises:
            TimeoutError: It did not come in time.
            ServiceError: It cannot be read.
        """
        if key not in self._reading:
            self._reading[key] = self._tasks.begin(self._read(read, keep=keep)), []
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

    async def _read(self, read: Callable[[], Awaitable[Average]], *, keep: bool) -> Average:
        average = await read()
        if keep:
            self.note(average)
        return average
