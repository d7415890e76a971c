"""Workers, ranked by how long others wait for them."""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nlargest

from gradserve.server_status import AccumulatorStatus, RoundStatus, WorkerStatus


@dataclass(slots=True)
class _Seen:
    rounds: int = 0
    lateness: float = 0.0
    times_last: int = 0
    waited_for: float = 0.0
    stale: int = 0
    missed: int = 0
    last_seen: float = 0.0


class WorkerRanking:
    """Counts what workers do in the rounds of accumulators."""

    def __init__(self) -> None:
        self._workers: dict[str, _Seen] = {}

    def add(self, accumulator: AccumulatorStatus) -> None:
        """Counts the rounds of an accumulator."""
        for each in accumulator.rounds:
            self._add_round(each)

    def ranked(self, count: int) -> tuple[WorkerStatus, ...]:
        """Returns the workers for which others waited longest, and then those that came too late most often."""
        found = (
            WorkerStatus(
                worker_id=worker_id,
                rounds=seen.rounds,
                mean_lateness=seen.lateness / seen.rounds if seen.rounds else 0.0,
                times_last=seen.times_last,
                waited_for=seen.waited_for,
                stale=seen.stale,
                missed=seen.missed,
                last_seen=seen.last_seen,
            )
            for worker_id, seen in self._workers.items()
        )
        return tuple(nlargest(count, found, key=lambda each: (each.waited_for, each.stale, each.missed)))

    def _add_round(self, described: RoundStatus) -> None:
        in_time = [each for each in described.arrivals if not each.stale]
        for arrival in described.arrivals:
            if not arrival.worker_id:
                continue
            seen = self._of(arrival.worker_id)
            seen.last_seen = max(seen.last_seen, described.began + arrival.after)
            if arrival.stale:
                seen.stale += 1
            else:
                seen.rounds += 1
                seen.lateness += arrival.after
        if described.ended and len(in_time) > 1 and in_time[-1].worker_id:
            seen = self._of(in_time[-1].worker_id)
            seen.times_last += 1
            seen.waited_for += in_time[-1].after - in_time[-2].after
        if described.ended:
            self._add_missing(described.missing)

    def _add_missing(self, workers: Iterable[str]) -> None:
        for worker_id in workers:
            self._of(worker_id).missed += 1

    def _of(self, worker_id: str) -> _Seen:
        return self._workers.setdefault(worker_id, _Seen())
