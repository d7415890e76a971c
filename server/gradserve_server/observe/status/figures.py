"""Everything that metrics show, as values that no longer change."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from gradserve.server_status import MemoryStatus
from gradserve_server.observe.calls import MethodCalls
from gradserve_server.observe.internal_names import run_of
from gradserve_server.observe.rounds.histories import Histories
from gradserve_server.observe.rounds.history import History
from gradserve_server.observe.rounds.totals import Totals
from gradserve_server.observe.traffic import Way

MOST_ACCUMULATORS = 100
"""Accumulators with metrics of their own: those whose rounds began or ended last, but no internal ones."""


@dataclass(frozen=True, slots=True)
class AccumulatorFigures:
    """The figures of one accumulator.

    Attributes:
        container: Its container.
        name: Its name.
        num_rounds: The rounds that have ended.
        stale: Its stale gradients.
        last_round_age: Seconds since its last round ended; None if none has.
        open_round_age: Seconds since the first gradient of its current round; 0 while it has none.
        median_round_seconds: The median time from the first gradient of its last rounds to their ends; 0 without any.
    """

    container: str
    name: str
    num_rounds: int
    stale: int
    last_round_age: float | None
    open_round_age: float
    median_round_seconds: float


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Counts of the whole server at one moment. They are copies, so other threads may read them.

    Attributes:
        version: The version of the server.
        calls: The calls of each method.
        traffic: Bytes and calls by way.
        totals: Counts of gradients and rounds.
        accumulators: The accumulators whose rounds began or ended last.
        memory: Bytes in use, by purpose.
        resources: How many there are of each kind of thing, and how many there may be; 0 for no limit.
        ops_prepared: False while the kernels of ops are being loaded or compiled.
        upstream: The address to which an aggregator passes gradients on; empty for other servers.
        passed_on: What an aggregator counts.
    """

    version: str
    calls: tuple[MethodCalls, ...]
    traffic: Mapping[str, Way]
    totals: Totals
    accumulators: tuple[AccumulatorFigures, ...]
    memory: tuple[MemoryStatus, ...]
    resources: Mapping[str, tuple[int, int]]
    ops_prepared: bool
    upstream: str
    passed_on: Mapping[str, int]


def accumulator_figures(histories: Histories) -> tuple[AccumulatorFigures, ...]:
    """Returns the figures of the accumulators whose rounds began or ended last."""
    now = histories.totals.clock()
    return tuple(
        [
            AccumulatorFigures(
                each.key.container,
                each.key.name,
                each.num_rounds,
                each.stale,
                now - each.last_round_ended if each.rounds else None,
                now - each.times[0] if each.times else 0.0,
                each.median_round_seconds,
            )
            for each in islice(filter(_is_of_users, histories.latest()), MOST_ACCUMULATORS)
        ]
    )


def _is_of_users(history: History) -> bool:
    return run_of(history.key.name) is None
