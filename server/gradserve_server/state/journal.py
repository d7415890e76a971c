"""The journal, which takes every event before it takes effect."""

from typing import Protocol, TypeVar

EventT_contra = TypeVar("EventT_contra", contravariant=True)


class Journal(Protocol[EventT_contra]):
    """Takes every event of one resource before it takes effect, in order."""

    async def append(self, event: EventT_contra) -> None:
        """Returns once the event may take effect.

        If it raises, or the task is cancelled, the event does not take effect: nothing has changed, and the event is
        not replayed.
        """
        ...


class NoJournal:
    """Lets every event take effect at once, and records nothing."""

    async def append(self, event: object) -> None:
        """Returns at once."""
