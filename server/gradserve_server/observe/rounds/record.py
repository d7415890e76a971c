"""A round that has ended."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Self

MOST_LATE = 64


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A round that has ended. Never changes, so other threads may read it. Times are in seconds, by `time.monotonic`.

    Attributes:
        step: The global_step that it led to.
        ended: When it ended.
        num_required: The number of gradients that it needed.
        workers: The ids of the senders of its gradients in order of arrival; "" for those without an id.
        times: When these arrived.
        late: Senders and times of gradients for its step that came after its end, at most `MOST_LATE`.
    """

    step: int
    ended: float
    num_required: int
    workers: tuple[str, ...]
    times: tuple[float, ...]
    late: Sequence[tuple[str, float]] = ()

    @property
    def began(self) -> float:
        """When its first gradient arrived."""
        return self.times[0] if self.times else self.ended

    def with_late(self, worker_ids: Sequence[str], now: float) -> Self:
        """Returns the record with gradients that came too late, as far as there is room."""
        room = MOST_LATE - len(self.late)
        return replace(self, late=(*self.late, *[(worker_id, now) for worker_id in worker_ids[:room]]))


def median_seconds(rounds: Sequence[RoundRecord]) -> float:
    """Returns the median time from the first gradient of a round to its end; 0 without any rounds."""
    return median([each.ended - each.began for each in rounds]) if rounds else 0.0
