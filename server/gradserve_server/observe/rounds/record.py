"""A round that has ended."""

from collections.abc import Sequence
from dataclasses import dataclass

MOST_LATE = 64


@dataclass(slots=True)
class RoundRecord:
    """A round that has ended. Times are in seconds, by `time.monotonic`.

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

    def add_late(self, worker_id: str, now: float) -> None:
        """Adds a gradient that came too late."""
        if len(self.late) < MOST_LATE:
            self.late = (*self.late, (worker_id, now))
