"""What stands between an event and its effect."""

from typing import Protocol, TypeVar

EventT_contra = TypeVar("EventT_contra", contravariant=True)


class Journal(Protocol[EventT_contra]):
    """Learns of every event of one resource before it takes effect, in their order."""

    async def append(self, event: EventT_contra) -> None:
        """Returns once the event may take effect.

        An exception stops it, also that of a task that is cancelled: nothing has changed then, and the event is not
        among those that are replayed.
        """
        ...


class NoJournal:
    """Lets every event take effect at once, and remembers nothing."""

    async def append(self, event: object) -> None:
        """Returns."""
