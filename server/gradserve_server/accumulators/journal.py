"""What stands between an event and its effect."""

from typing import Protocol

from gradserve_server.accumulators.events import Event


class Journal(Protocol):
    """Learns of every event before it takes effect, in their order."""

    async def append(self, event: Event) -> None:
        """Returns once the event may take effect. An exception stops it: nothing has changed then."""
        ...


class NoJournal:
    """Lets every event take effect at once, and remembers nothing."""

    async def append(self, event: Event) -> None:
        """Returns."""
