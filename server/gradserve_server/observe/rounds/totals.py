"""Counts of the gradients and rounds of all accumulators."""

from collections.abc import Callable
from typing import Self

from gradserve_server.observe.histogram import ROUND_SECONDS, STEPS, Histogram

MOST_WORKERS = 100
OTHERS = "(others)"


class Totals:
    """Counts of gradients and rounds since the server started, over all accumulators. Used on the event loop only.

    Attributes:
        clock: The time in seconds, as `time.monotonic`.
        accepted: The number of gradients that joined a round.
        stale: The number of those that came too late.
        duplicate: The number of those that were there already.
        refused: The number of those that were not valid, or for which there was no room.
        accepted_bytes: The bytes of the accepted ones.
        stale_bytes: The bytes of the stale ones: work for nothing.
        rounds: Seconds from the first gradient of a round to its end; for each round.
        gathering: Seconds from the first gradient of a round to its last; for each round.
        staleness: How many steps stale gradients were late.
        waited_for: Seconds that rounds had all gradients but the last, by the worker that sent the last; at most
            `MOST_WORKERS` of them, the others together as `OTHERS`.
    """

    __slots__ = (
        "accepted",
        "accepted_bytes",
        "clock",
        "duplicate",
        "gathering",
        "refused",
        "rounds",
        "stale",
        "stale_bytes",
        "staleness",
        "waited_for",
    )

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.accepted = self.stale = self.duplicate = self.refused = 0
        self.accepted_bytes = self.stale_bytes = 0
        self.rounds = Histogram(ROUND_SECONDS)
        self.gathering = Histogram(ROUND_SECONDS)
        self.staleness = Histogram(STEPS)
        self.waited_for: dict[str, float] = {}

    def copy(self) -> Self:
        """Returns the counts so far."""
        made = type(self)(self.clock)
        made.accepted, made.stale, made.duplicate, made.refused = (
            self.accepted,
            self.stale,
            self.duplicate,
            self.refused,
        )
        made.accepted_bytes, made.stale_bytes = self.accepted_bytes, self.stale_bytes
        made.rounds, made.gathering, made.staleness = self.rounds.copy(), self.gathering.copy(), self.staleness.copy()
        made.waited_for = dict(self.waited_for)
        return made

    def wait_for(self, worker_id: str, seconds: float) -> None:
        """Counts that a round had to wait for its last worker."""
        waited = self.waited_for
        if worker_id not in waited and len(waited) >= MOST_WORKERS:
            worker_id = OTHERS
        waited[worker_id] = waited.get(worker_id, 0.0) + seconds
