"""What a shard tells the disk."""

import asyncio
from collections.abc import Collection
from typing import NamedTuple, Protocol

from gradserve_server.accumulators.gradient import Gradient


class PartKey(NamedTuple):
    """Names a gradient that is held for a round of a sharded accumulator.

    Attributes:
        home_incarnation: The incarnation of the accumulator at its home.
        id: The id of the gradient; see `part_id`.
    """

    home_incarnation: str
    id: str


class Staged(NamedTuple):
    """What was said of a gradient when it was staged.

    Attributes:
        epoch: The epoch of the accumulator at its home, the only one in which it may count; None: any.
        local_step: The step at which it was computed.
    """

    epoch: int | None
    local_step: int


class ShardJournal(Protocol):
    """Takes the gradients that one shard holds."""

    async def accept(self, key: PartKey, staged: Staged, gradient: Gradient) -> asyncio.Future[None] | None:
        """Writes a gradient.

        Returns:
            What is done when it may be acknowledged, None if that is now. It must not change until then.

        Raises:
            ServiceError: There is no room; nothing has changed.
        """
        ...

    def stage_again(self, key: PartKey, epoch: int) -> asyncio.Future[None] | None:
        """Writes that a gradient was staged again in a later epoch; returns what `accept` does."""
        ...

    def forget(self, keys: Collection[PartKey]) -> None:
        """Removes gradients that no round needs any more."""
        ...


class MemoryShardJournal:
    """Writes nothing."""

    async def accept(self, key: PartKey, staged: Staged, gradient: Gradient) -> asyncio.Future[None] | None:
        """See `ShardJournal`."""
        return None

    def stage_again(self, key: PartKey, epoch: int) -> asyncio.Future[None] | None:
        """See `ShardJournal`."""
        return None

    def forget(self, keys: Collection[PartKey]) -> None:
        """See `ShardJournal`."""
