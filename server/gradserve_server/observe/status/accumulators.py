"""Accumulators and their last rounds, as a status shows them."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from gradserve.server_status import AccumulatorStatus, ArrivalStatus, RoundStatus
from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.observe.rounds.history import History
from gradserve_server.observe.rounds.record import RoundRecord, median_seconds
from gradserve_server.resources.registry import ResourceKey

MOST_WORKERS = 500
"""The workers that a list of one round has at most."""


class AccumulatorSnapshot(NamedTuple):
    """An accumulator at one moment, to be described by any thread.

    Attributes:
        key: Its container and name.
        owner: The id of the client that owns it; empty if it is shared.
        status: What is known of it, without its rounds.
        rounds: Its last rounds.
        workers: The senders in the current round, in order of arrival.
        times: When their gradients arrived, by the clock of the histories.
    """

    key: ResourceKey
    owner: str
    status: AccumulatorStatus
    rounds: tuple[RoundRecord, ...]
    workers: tuple[str, ...]
    times: tuple[float, ...]

    @property
    def last_round_ended(self) -> float:
        """When the last round ended; 0 if none is kept."""
        return self.rounds[-1].ended if self.rounds else 0.0

    def described(self, started: float, max_rounds: int) -> AccumulatorStatus:
        """Returns what is known of it.

        Args:
            started: When the server started, by the clock of the histories.
            max_rounds: The most rounds, of which the latest are described.
        """
        count = max_rounds - bool(self.times)
        previous = [None, *self.rounds]
        pairs = list(zip(self.rounds, previous, strict=False))[-count:] if count else []
        described = [_ended(each, before, started) for each, before in pairs]
        if self.times:
            described.append(self._open(started))
        return replace(self.status, median_round_seconds=median_seconds(self.rounds), rounds=tuple(described))

    def _open(self, started: float) -> RoundStatus:
        began = self.times[0]
        return RoundStatus(
            step=self.status.global_step + 1,
            began=began - started,
            num_required=self.status.num_required,
            arrivals=tuple(
                [ArrivalStatus(worker, at - began) for worker, at in zip(self.workers, self.times, strict=True)]
            ),
            missing=self.status.missing,
        )


def snapshot_of(key: ResourceKey, owner: str, accumulator: Accumulator, history: History) -> AccumulatorSnapshot:
    """Returns an accumulator with this name and owner as it is, and what has happened to it."""
    rounds, queue = accumulator.rounds, accumulator.queue
    status = AccumulatorStatus(
        container=key.container,
        name=key.name,
        global_step=rounds.global_step,
        num_rounds=rounds.current.number,
        rounds_per_second=history.rounds_per_second,
        num_accumulated=accumulator.num_accumulated,
        num_required=queue.num_required,
        num_waiting=len(queue),
        num_bytes=accumulator.num_bytes,
        accepted=history.accepted,
        stale=history.stale,
        duplicate=history.duplicate,
        refused=history.refused,
        workers=_some(rounds.members.workers),
        missing=_some(rounds.missing_workers),
    )
    return AccumulatorSnapshot(key, owner, status, tuple(history.rounds), tuple(history.workers), tuple(history.times))


def _ended(record: RoundRecord, before: RoundRecord | None, started: float) -> RoundStatus:
    began = record.began
    arrivals = [ArrivalStatus(worker, at - began) for worker, at in zip(record.workers, record.times, strict=True)]
    arrivals += [ArrivalStatus(worker, at - began, stale=True) for worker, at in record.late]
    missing: tuple[str, ...] = ()
    if before is not None:
        present = set(record.workers)
        missing = _some(dict.fromkeys(worker for worker in before.workers if worker and worker not in present))
    return RoundStatus(
        step=record.step,
        began=began - started,
        ended=record.ended - started,
        num_required=record.num_required,
        arrivals=tuple(arrivals),
        missing=missing,
    )


def _some(workers: Iterable[str]) -> tuple[str, ...]:
    return tuple(islice(workers, MOST_WORKERS))
