"""The journal of an accumulator: its changes, with the values that belong to them."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from gradserve_server.accumulators.events import Event, GradientAnswered
from gradserve_server.accumulators.gradient import Average, Gradient
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.incarnations import RecordedNumber
from gradserve_server.accumulators.shard_journal import MemoryShardJournal, ShardJournal
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.state.durability import Durability
from gradserve_server.state.journal import Journal, NoJournal


class AccumulatorJournal(Protocol):
    """Takes every change of one accumulator before it takes effect, in order.

    Attributes:
        is_durable: Whether averages must be settled.
    """

    is_durable: bool

    async def append(self, event: Event) -> None:
        """Returns once an event may take effect.

        If it raises, or the task is cancelled, the event does not take effect: nothing has changed, and the event is
        not replayed.
        """
        ...

    async def accept(self, event: GradientAnswered, gradient: Gradient) -> asyncio.Future[None] | None:
        """Does the same for an event that accepts a gradient.

        Returns:
            What is done when the gradient may be acknowledged, None if that is now. The gradient must not change until
            then. If it fails, nobody may see what came of the event: the server stops.
        """
        ...

    async def reserve(self, num_bytes: int) -> None:
        """Makes sure that there is room for the average of a round that is about to end.

        Raises:
            ServiceError: There is none; nothing has changed.
        """
        ...

    async def settle(self, average: Average, answered: Sequence[RequestId]) -> None:
        """Returns when others may see that a round has ended. If it raises, nobody ever may: the server stops.

        Args:
            average: The result of the round.
            answered: The calls that it answers.
        """
        ...

    def forget(self, rounds: Collection[int]) -> None:
        """Notes that the averages of rounds are no longer kept."""
        ...

    def of_shard(self) -> ShardJournal:
        """Returns the journal of what this server has of the accumulator, if that is sharded."""
        ...


class Records(RecordedNumber, Protocol):
    """Makes the journals of a server's accumulators.

    Attributes:
        default: The durability of accumulators that ask for none.
    """

    default: Durability

    def begin(
        self, key: ResourceKey, spec: AccumulatorSpec, lifetime: Lifetime, incarnation: str
    ) -> AccumulatorJournal:
        """Returns the journal of a new accumulator, whose spec says how durable it is.

        Raises:
            InvalidArgumentError: It cannot be so durable here.
        """
        ...

    def end(self, key: ResourceKey) -> None:
        """Notes that an accumulator was deleted."""
        ...

    async def settle(self) -> None:
        """Returns when others may see that accumulators were created or deleted."""
        ...


class MemoryJournal:
    """The journal of an accumulator of which nothing survives. Its events go to another journal."""

    is_durable = False

    def __init__(self, events: Journal[Event]) -> None:
        self._events = events

    async def append(self, event: Event) -> None:
        """See `AccumulatorJournal`."""
        await self._events.append(event)

    async def accept(self, event: GradientAnswered, gradient: Gradient) -> asyncio.Future[None] | None:
        """See `AccumulatorJournal`."""
        await self._events.append(event)
        return None

    async def reserve(self, num_bytes: int) -> None:
        """See `AccumulatorJournal`."""

    async def settle(self, average: Average, answered: Sequence[RequestId]) -> None:
        """See `AccumulatorJournal`."""

    def forget(self, rounds: Collection[int]) -> None:
        """See `AccumulatorJournal`."""

    def of_shard(self) -> ShardJournal:
        """See `AccumulatorJournal`."""
        return MemoryShardJournal()


class MemoryRecords:
    """The journals of a server that keeps nothing on disk."""

    default = Durability.NONE
    newest_number = 0

    def __init__(self, journal_of: Callable[[ResourceKey], Journal[Event]] = lambda _: NoJournal()) -> None:
        """Takes what takes the events of an accumulator."""
        self._journal_of = journal_of

    def begin(
        self, key: ResourceKey, spec: AccumulatorSpec, lifetime: Lifetime, incarnation: str
    ) -> AccumulatorJournal:
        """See `Records`."""
        if spec.durability not in (None, Durability.NONE):
            raise InvalidArgumentError(
                f"expected NONE, as the server has no state directory, got {spec.durability.value}",
                field="spec.durability",
            )
        return MemoryJournal(self._journal_of(key))

    def end(self, key: ResourceKey) -> None:
        """See `Records`."""

    def note_number(self, number: int) -> None:
        """See `RecordedNumber`."""

    async def settle(self) -> None:
        """See `Records`."""
