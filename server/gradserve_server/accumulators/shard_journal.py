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


class ShardJournal(Protocol):
    """Takes the gradients that one shard holds."""

    async def accept(self, key: PartKey, local_step: int, gradient: Gradient) -> asyncio.Future[None] | None:
        """Writes a gradient.

        Returns:
            What is done when it may be acknowledged, None if that is now. It must not change until then.

        Raises:
            ServiceError: There is no room; nothing has changed.
        """
        ...

    def forget(self, keys: Collection[PartKey]) -> None:
        """Removes gradients that no round needs any more."""
        ...


class MemoryShardJournal:
    """Writes nothing."""

    async def accept(self, key: PartKey, local_step: int, gradient: Gradient) -> asyncio.Future[None] | None:
        """See `ShardJournal`."""
        return None

    def forget(self, keys: Collection[PartKey]) -> None:
        """See `ShardJournal`."""
