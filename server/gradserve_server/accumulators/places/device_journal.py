"""Takes what must be on disk from the memory of a device."""

import asyncio
from collections.abc import Callable, Collection, Sequence

from gradserve_server.accumulators.events import Event, GradientAnswered
from gradserve_server.accumulators.gradient import Average, Gradient
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.journal import AccumulatorJournal
from gradserve_server.accumulators.shard_journal import ShardJournal
from gradserve_server.devices.compute import Compute
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.resources.quotas import Account, Quota
from gradserve_server.state.durability import Durability


class DeviceJournal:
    """The journal of an accumulator on a device: copies to the host what another journal writes, and that only.

    The copy of an average for the disk is the one that readers get, too.
    """

    is_durable = True

    def __init__(
        self,
        journal: AccumulatorJournal,
        durability: Durability,
        compute: Compute,
        to_host: Callable[[Gradient], Gradient],
        memory: Quota,
    ) -> None:
        """Takes the other journal, what it writes, what runs copies, what copies, and the host's quota of bytes."""
        self._journal = journal
        self._writes_gradients = durability is Durability.GRADIENT
        self._compute = compute
        self._to_host = to_host
        self._memory = memory
        self._reserved = Account(memory)
        """For the copy of the average of a round that is about to end."""

    async def append(self, event: Event) -> None:
        """See `AccumulatorJournal`."""
        try:
            await self._journal.append(event)
        except BaseException:
            self._reserved.settle(0)  # the round does not end
            raise

    async def accept(self, event: GradientAnswered, gradient: Gradient) -> asyncio.Future[None] | None:
        """See `AccumulatorJournal`."""
        if not self._writes_gradients:
            return await self._journal.accept(event, gradient)
        copied = Account(self._memory)
        copied.grow(gradient.nbytes)
        try:
            on_host = await self._compute.run_in_thread(self._to_host, gradient)
            written = await self._journal.accept(event, on_host)
        except BaseException as error:
            copied.settle(0)
            if isinstance(error, MemoryError):
                raise ResourceExhaustedError("the server has no memory left to write this gradient") from error
            raise
        if written is None:
            copied.settle(0)
        else:
            written.add_done_callback(lambda _: copied.settle(0))
        return written

    async def reserve(self, num_bytes: int) -> None:
        """See `AccumulatorJournal`."""
        self._reserved.settle(0)
        self._reserved.grow(num_bytes)
        try:
            await self._journal.reserve(num_bytes)
        except BaseException:
            self._reserved.settle(0)
            raise

    async def settle(self, average: Average, answered: Sequence[RequestId]) -> None:
        """See `AccumulatorJournal`."""
        self._reserved.settle(0)  # taken again at once
        try:
            await self._journal.settle(await average.on_host(), answered)
        except BaseException:
            average.release()
            raise

    def forget(self, rounds: Collection[int]) -> None:
        """See `AccumulatorJournal`."""
        self._journal.forget(rounds)

    def of_shard(self) -> ShardJournal:
        """See `AccumulatorJournal`: sharded accumulators are on the host."""
        return self._journal.of_shard()
