"""The journals that take every change of accumulators: what durable ones must do, and one that writes nothing."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from gradserve_server.accumulators.events import Event, GradientAnswered
from gradserve_server.accumulators.gradient import Average, Gradient
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.spec import AccumulatorSpec
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.storage.journal import Durability, Journal, NoJournal


class AccumulatorJournal(Protocol):
    """Takes every change of one accumulator, in order, before it takes effect.

    Attributes:
        is_durable: Whether averages must be settled.
    """

    is_durable: bool

    async def append(self, event: Event) -> None:
        """Returns once an event may take effect.

        If this raises or the task is cancelled, the event has no effect: nothing has changed, and it is not replayed.
        """
        ...

    async def accept(self, event: GradientAnswered, gradient: Gradient) -> asyncio.Future[None] | None:
        """Appends an event that accepts a gradient, with its values.

        Returns:
            A future that is done when the gradient may be acknowledged; None if it may be now. The gradient must not
            change until then. If the future fails, nobody may see an effect of the event: the server stops.
        """
        ...

    async def reserve(self, num_bytes: int) -> None:
        """Reserves space for the average of a round that is about to end.

        Raises:
            ServiceError: There is no space; nothing has changed.
        """
        ...

    async def settle(self, average: Average, answered: Sequence[RequestId]) -> None:
        """Returns when others may see that a round has ended. If this raises, nobody ever may: the server stops.

        Args:
            average: The result of the round.
            answered: The calls that it answers.
        """
        ...

    def forget(self, rounds: Collection[int]) -> None:
        """Removes the averages of rounds that are no longer kept."""
        ...

    def of_shard(self) -> "ShardJournal | None":
        """Returns the journal of this server's shard; None if its gradients are not written."""
        ...


class PartKey(NamedTuple):
    """Names a gradient that servers hold for a round of a sharded accumulator.

    Attributes:
        home_incarnation: The incarnation of the accumulator at its home.
        id: The id of the gradient; see `part_id`.
    """

    home_incarnation: str
    id: str


class Staged(NamedTuple):
    """Describes a staged gradient.

    Attributes:
        epoch: The epoch of the accumulator at its home, the only one in which the gradient may count; None: any.
        local_step: The step at which the gradient was computed.
    """

    epoch: int | None
    local_step: int


class ShardJournal(Protocol):
    """Takes the gradients that one shard holds."""

    async def accept(self, key: PartKey, staged: Staged, gradient: Gradient) -> asyncio.Future[None] | None:
        """Writes a gradient.

        Returns:
            A future that is done when the gradient may be acknowledged; None if it may be now. The gradient must not
            change until then.

        Raises:
            ServiceError: There is no space; nothing has changed.
        """
        ...

    def stage_again(self, key: PartKey, epoch: int) -> asyncio.Future[None] | None:
        """Records that a gradient was staged again in a later epoch; returns a future as `accept` does."""
        ...

    def forget(self, keys: Collection[PartKey]) -> None:
        """Removes gradients that no round needs any more."""
        ...


class Records(Protocol):
    """Creates the journals of a server's accumulators.

    Attributes:
        default: The durability of accumulators that ask for none.
        newest_number: The number of the newest incarnation that earlier runs have recorded; 0 if there is none.
    """

    default: Durability
    newest_number: int

    def begin(
        self, key: ResourceKey, spec: AccumulatorSpec, lifetime: Lifetime, incarnation: str
    ) -> AccumulatorJournal:
        """Returns the journal of a new accumulator, whose spec has its durability.

        Raises:
            InvalidArgumentError: This server cannot be that durable.
        """
        ...

    def end(self, key: ResourceKey) -> None:
        """Removes what is recorded of a deleted accumulator."""
        ...

    def note_number(self, number: int) -> None:
        """Records the number of a new incarnation, durably once `settle` has returned."""
        ...

    async def settle(self) -> None:
        """Returns when others may see that accumulators were created or deleted."""
        ...


class MemoryJournal:
    """The journal of an accumulator of which nothing survives. Passes its events to another journal."""

    is_durable = False

    def __init__(self, events: Journal[Event]) -> None:
        self._events = events

    async def append(self, event: Event) -> None:
        """Passes the event on."""
        await self._events.append(event)

    async def accept(self, event: GradientAnswered, gradient: Gradient) -> asyncio.Future[None] | None:
        """Passes the event on; the gradient may be acknowledged at once."""
        await self._events.append(event)
        return None

    async def reserve(self, num_bytes: int) -> None:
        """Reserves nothing."""

    async def settle(self, average: Average, answered: Sequence[RequestId]) -> None:
        """Writes nothing."""

    def forget(self, rounds: Collection[int]) -> None:
        """Has nothing to remove."""

    def of_shard(self) -> None:
        """Returns None: gradients of shards are not written either."""


class MemoryRecords:
    """The journals of a server that keeps nothing on disk."""

    default = Durability.NONE
    newest_number = 0

    def __init__(self, journal_of: Callable[[ResourceKey], Journal[Event]] = lambda _: NoJournal()) -> None:
        self._journal_of = journal_of

    def begin(
        self, key: ResourceKey, spec: AccumulatorSpec, lifetime: Lifetime, incarnation: str
    ) -> AccumulatorJournal:
        """Returns a journal in memory.

        Raises:
            InvalidArgumentError: The accumulator asks for more durability.
        """
        if spec.durability not in (None, Durability.NONE):
            raise InvalidArgumentError(
                f"expected NONE, as the server has no state directory, got {spec.durability.value}",
                field="spec.durability",
            )
        return MemoryJournal(self._journal_of(key))

    def end(self, key: ResourceKey) -> None:
        """Has nothing to remove."""

    def note_number(self, number: int) -> None:
        """Records nothing: without a state directory, later runs have later clocks."""

    async def settle(self) -> None:
        """Has nothing to wait for."""
