"""The journal of a layer: its changes, from before they take effect."""

from collections.abc import Callable
from typing import Protocol

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.layers.batch_norm.events import Event
from gradserve_server.layers.batch_norm.state import LayerState
from gradserve_server.resources.lifetimes import Lifetime
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.state.durability import Durability
from gradserve_server.state.journal import Journal, NoJournal


class LayerJournal(Protocol):
    """Takes every change of one layer before it takes effect, in order."""

    def begin(self, lifetime: Lifetime, state: LayerState) -> None:
        """Notes that the layer can be found by its name from now on.

        Args:
            lifetime: The leases that can end it.
            state: Its state, which the events that were taken have led to, whenever there is a next one.
        """
        ...

    async def append(self, event: Event) -> None:
        """Returns once an event may take effect.

        If it raises, the event does not take effect: nothing has changed, and the event is not replayed.
        """
        ...

    def end(self) -> None:
        """Notes that the layer was deleted, or was not needed."""
        ...


class LayerRecords(Protocol):
    """Makes the journals of a server's layers.

    Attributes:
        default: The durability of layers that ask for none.
    """

    default: Durability

    def journal(self, key: ResourceKey, config: BatchNormConfig, incarnation: str, creation_id: str) -> LayerJournal:
        """Returns the journal of a new layer, whose configuration says how durable it is.

        Raises:
            InvalidArgumentError: It cannot be so durable here.
        """
        ...

    async def settle(self) -> None:
        """Returns when others may see that layers were created or deleted."""
        ...


class MemoryLayerJournal:
    """The journal of a layer of which nothing survives. Its events go to another journal."""

    def __init__(self, events: Journal[Event]) -> None:
        self._events = events

    def begin(self, lifetime: Lifetime, state: LayerState) -> None:
        """See `LayerJournal`."""

    async def append(self, event: Event) -> None:
        """See `LayerJournal`."""
        await self._events.append(event)

    def end(self) -> None:
        """See `LayerJournal`."""


class MemoryLayerRecords:
    """The journals of a server that keeps nothing on disk."""

    default = Durability.NONE

    def __init__(self, journal_of: Callable[[ResourceKey], Journal[Event]] = lambda _: NoJournal()) -> None:
        """Takes what takes the events of a layer."""
        self._journal_of = journal_of

    def journal(self, key: ResourceKey, config: BatchNormConfig, incarnation: str, creation_id: str) -> LayerJournal:
        """See `LayerRecords`."""
        if config.durability not in (None, Durability.NONE):
            raise InvalidArgumentError(
                f"expected NONE, as the server has no state directory, got {config.durability.value}",
                field="config.durability",
            )
        return MemoryLayerJournal(self._journal_of(key))

    async def settle(self) -> None:
        """See `LayerRecords`."""
