"""Events: the journal that records each before it takes effect, and the window of the latest ids."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from enum import Enum
from typing import Generic, Protocol, TypeVar

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


class Durability(Enum):
    """The changes that survive a crash or a loss of power; see the enum of the protos."""

    NONE = "NONE"
    """Nothing."""
    ROUND = "ROUND"
    """Rounds that have ended, from before anybody learns of their end."""
    GRADIENT = "GRADIENT"
    """Gradients, too, from before their senders learn that they count."""


IdT = TypeVar("IdT", bound=Hashable)
RecordT = TypeVar("RecordT")


class IdWindow(Generic[IdT, RecordT]):
    """A sliding window: remembers a record for each of the latest ids, and forgets the oldest.

    Its contents depend only on the order of calls of `remember`, so the same events make the same window.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._records: OrderedDict[IdT, RecordT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[tuple[IdT, RecordT]]:
        """Iterates over ids and records, oldest first."""
        return iter(self._records.items())

    def recall(self, used_id: IdT) -> RecordT | None:
        """Returns the record of an id, or None if the id is not remembered."""
        return self._records.get(used_id)

    def remember(self, used_id: IdT, record: RecordT) -> list[IdT]:
        """Makes an id the latest, with this record; returns the forgotten ids."""
        self._records[used_id] = record
        self._records.move_to_end(used_id)
        return [self._records.popitem(last=False)[0] for _ in range(len(self._records) - self.size)]
