"""The histories of all accumulators."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

from gradserve_server.observe.rounds.history import History
from gradserve_server.observe.rounds.totals import Totals
from gradserve_server.resources.registry import ResourceKey

MOST_ARRIVALS = 60_000
"""The arrivals that are kept of all rounds together; one takes about 100 bytes."""


class Histories:
    """The histories of all accumulators, in bounded memory: the rounds of those idle for longest are forgotten first.

    Used on the event loop only.

    Attributes:
        totals: The counts of all accumulators together, with those that are gone.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, most_arrivals: int = MOST_ARRIVALS) -> None:
        """Takes the clock, and how many arrivals may be kept."""
        self.totals = Totals(clock)
        self._most_arrivals = most_arrivals
        self._num_arrivals = 0
        self._by_key: dict[ResourceKey, History] = {}
        self._active: OrderedDict[History, None] = OrderedDict()
        self._newest: History | None = None

    def begin(self, key: ResourceKey) -> History:
        """Returns a new history for an accumulator that has just been made."""
        history = self._by_key[key] = History(key, self.totals, self)
        return history

    def of(self, key: ResourceKey) -> History | None:
        """Returns the history of an accumulator, None if there is none of this name."""
        return self._by_key.get(key)

    def __len__(self) -> int:
        return len(self._by_key)

    def latest(self) -> Iterator[History]:
        """Returns the accumulators with gradients: where a round ended, or the first began, last, comes first."""
        return reversed(self._active)

    def has_more(self, history: History, num_arrivals: int) -> None:
        """See `Keeper`."""
        active = self._active
        if history is not self._newest:
            active[history] = None
            active.move_to_end(history)
            self._newest = history
        self._num_arrivals += num_arrivals
        while self._num_arrivals > self._most_arrivals and len(active) > 1:
            idle, _ = active.popitem(last=False)
            self._num_arrivals -= idle.forget_rounds()

    def remove(self, history: History) -> None:
        """See `Keeper`."""
        if history in self._active:
            del self._active[history]
            if history is self._newest:
                self._newest = None
            self._num_arrivals -= history.num_kept
        if self._by_key.get(history.key) is history:
            del self._by_key[history.key]
