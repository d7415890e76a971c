"""Accumulators and their last rounds, as a status shows them."""

from collections.abc import Iterable
from itertools import islice

from gradserve.server_status import AccumulatorStatus, ArrivalStatus, RoundStatus
from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.observe.rounds.history import History
from gradserve_server.observe.rounds.record import RoundRecord
from gradserve_server.resources import ResourceKey

MOST_WORKERS = 500
"""The workers that a list of one round has at most."""


def accumulator_status(
    key: ResourceKey, accumulator: Accumulator, history: History, started: float, max_rounds: int
) -> AccumulatorStatus:
    """Returns what is known of an accumulator.

    Args:
        key: Its container and name.
        accumulator: The accumulator.
        history: What has happened to it.
        started: When the server started, by the clock of the history.
        max_rounds: The most rounds, of which the latest are described.
    """
    rounds = [*history.rounds]
    previous = [None, *rounds]
    described = [_ended(each, before, started) for each, before in zip(rounds, previous, strict=False)]
    if history.times:
        described.append(_open(accumulator, history, started))
    return AccumulatorStatus(
        container=key.container,
        name=key.name,
        global_step=accumulator.rounds.global_step,
        num_rounds=accumulator.rounds.current.number,
        rounds_per_second=history.rounds_per_second,
        num_accumulated=accumulator.num_accumulated,
        num_required=accumulator.queue.num_required,
        num_waiting=len(accumulator.queue),
        num_bytes=accumulator.num_bytes,
        accepted=history.accepted,
        stale=history.stale,
        duplicate=history.duplicate,
        refused=history.refused,
        median_round_seconds=history.median_round_seconds,
        workers=_some(accumulator.rounds.members.workers),
        missing=_some(accumulator.rounds.missing_workers),
        rounds=tuple(described[-max_rounds:]),
    )


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


def _open(accumulator: Accumulator, history: History, started: float) -> RoundStatus:
    began = history.times[0]
    return RoundStatus(
        step=accumulator.rounds.global_step + 1,
        began=began - started,
        num_required=accumulator.queue.num_required,
        arrivals=tuple(
            [ArrivalStatus(worker, at - began) for worker, at in zip(history.workers, history.times, strict=True)]
        ),
        missing=_some(accumulator.rounds.missing_workers),
    )


def _some(workers: Iterable[str]) -> tuple[str, ...]:
    return tuple(islice(workers, MOST_WORKERS))
