"""The rounds of all accumulators, or of all parameters: when each worker's gradient arrived, and which were late."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Self, TypeVar

from gradserve_server.accumulators.gradient import Contribution, DifferentWorker
from gradserve_server.accumulators.rounds import KEPT_ROUNDS, NOT_FINITE, Comparison, Outcome, Round, SeenRound, Wait
from gradserve_server.errors import ServiceError
from gradserve_server.limits import quoted
from gradserve_server.observe.calls import ROUND_SECONDS, STEPS, Histogram, Waiting
from gradserve_server.resources.registry import ResourceKey

MOST_LATE = 64
MOST_WORKERS = 100
OTHERS = "(others)"
_MOST_NAMED = 10
"""Workers that a line of the log names."""
_MOST_ARRIVALS = 1000
"""Arrivals kept for one round; beyond that, only the latest."""
_RATE_SECONDS = 10.0
"""The time over which the rate of rounds is averaged."""
_RATED_SECONDS = 0.1
"""Rounds that end within this time of each other enter the rate together."""
MOST_ARRIVALS = 60_000
"""The arrivals kept for all rounds together; one takes about 100 bytes."""
_log = logging.getLogger("gradserve_server.rounds")
HistoryT = TypeVar("HistoryT", bound="History")


class Histories:
    """The histories of all accumulators, in bounded memory: forgets the rounds of the longest idle ones first.

    Used on the event loop only.

    Attributes:
        totals: The counts over all accumulators, deleted ones included.
        wall_clock: The seconds since 1970.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        most_arrivals: int = MOST_ARRIVALS,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`wall_clock` has the seconds since 1970, for what later runs of the server are to know."""
        self.totals = Totals(clock)
        self.wall_clock = wall_clock
        self._most_arrivals = most_arrivals
        self._num_arrivals = 0
        self._by_key: dict[ResourceKey, History] = {}
        self._active: OrderedDict[History, None] = OrderedDict()
        self._newest: History | None = None

    def begin(self, key: ResourceKey) -> History:
        """Returns a new history for an accumulator that has just been created."""
        return self.add(History(key, self.totals, self))

    def add(self, history: HistoryT) -> HistoryT:
        """Keeps a new history; returns it."""
        self._by_key[history.key] = history
        return history

    def of(self, key: ResourceKey) -> History | None:
        """Returns the history of an accumulator, None if there is no such accumulator."""
        return self._by_key.get(key)

    def __len__(self) -> int:
        return len(self._by_key)

    def latest(self) -> Iterator[History]:
        """Returns the accumulators with gradients, those whose round ended (or first round began) last first."""
        return reversed(self._active)

    def has_more(self, history: History, num_arrivals: int) -> None:
        """Notes that an accumulator's round began or ended, and how many more arrivals its history keeps since."""
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
        """Forgets an accumulator that was closed."""
        if history in self._active:
            del self._active[history]
            if history is self._newest:
                self._newest = None
            self._num_arrivals -= history.num_kept
        if self._by_key.get(history.key) is history:
            del self._by_key[history.key]


class History:
    """Counts, the rate of rounds and the last rounds of one accumulator, which it observes as an `AccumulatorObserver`.

    Attributes:
        key: The container and name of the accumulator.
        accepted: The number of gradients that joined a round.
        stale: The number of gradients that arrived too late.
        duplicate: The number of gradients that had arrived before: from the same worker, or in a repeated call.
        refused: The number of gradients that were invalid or did not fit.
        num_rounds: The number of rounds that have ended since the server started.
        num_compared: The number of workers whose parameters the latest comparison since then has compared.
        rounds: The last rounds, those of earlier runs of the server included if they were kept.
        workers: The senders of the current round's gradients, in order of arrival.
        times: When these gradients arrived, by `time.monotonic`.
    """

    __slots__ = (
        "_began",
        "_different",
        "_histories",
        "_latest",
        "_previous",
        "_rate",
        "_rated",
        "_totals",
        "_unrated",
        "accepted",
        "duplicate",
        "key",
        "num_compared",
        "num_rounds",
        "refused",
        "rounds",
        "stale",
        "times",
        "workers",
    )

    _LOG_LINE = "%s: %d gradients led to step %d after %.6f s; the last one was from %r"

    def __init__(self, key: ResourceKey, totals: Totals, histories: Histories) -> None:
        self.key = key
        self._totals = totals
        self._histories = histories
        self.accepted = self.stale = self.duplicate = self.refused = self.num_rounds = self.num_compared = 0
        self.rounds: list[RoundRecord] = []  # an empty deque takes ten times the memory
        self.workers: list[str] = []
        self.times: list[float] = []
        self._different: tuple[DifferentWorker, ...] = ()
        self._latest = self._previous = self._rate = 0.0
        self._unrated = 0
        self._began = self._rated = totals.clock()

    def on_answer(self, contribution: Contribution, outcome: Outcome, num_bytes: int) -> None:
        totals = self._totals
        now = totals.clock()
        if outcome is Outcome.ACCEPTED:
            senders = contribution.workers
            self.accepted += len(senders)
            totals.accepted += len(senders)
            totals.accepted_bytes += num_bytes
            if not self.rounds and not self.times:
                self._histories.has_more(self, 0)
            self._previous, self._latest = self._latest, now
            for worker_id in senders:
                if len(self.times) < _MOST_ARRIVALS:
                    self.workers.append(sys.intern(worker_id))
                    self.times.append(now)
                else:
                    self.workers[-1], self.times[-1] = sys.intern(worker_id), now
        elif outcome is Outcome.STALE:
            self.stale += contribution.num_gradients
            totals.stale += contribution.num_gradients
            totals.stale_bytes += num_bytes
            self._add_late(contribution, now)
        else:
            self.on_repeat()

    def on_repeat(self) -> None:
        self.duplicate += 1
        self._totals.duplicate += 1

    def on_refusal(self, error: ServiceError) -> None:
        self.refused += 1
        self._totals.refused += 1
        if error.code == NOT_FINITE:
            self._totals.not_finite += 1

    def about_to_end(self, step: int, num_required: int) -> SeenRound | None:
        now = self._totals.clock()
        began = self.times[0] if self.times else now
        after = tuple([round(at - began, 6) for at in self.times])
        ended = self._histories.wall_clock()
        return SeenRound(step, ended, round(now - began, 6), num_required, tuple(self.workers), after)

    def on_restore(self, seen: Sequence[SeenRound]) -> None:
        now = self._totals.clock()
        since = now - self._histories.wall_clock()
        for each in seen[-KEPT_ROUNDS:]:
            ended = min(each.ended + since, now)  # the clock may have been set back
            times = tuple([ended - each.seconds + after for after in each.after])
            workers = tuple([sys.intern(worker_id) for worker_id in each.workers])
            self.rounds.append(RoundRecord(each.step, ended, each.num_required, workers, times))
        if seen:
            self._histories.has_more(self, self.num_kept)

    def on_round_end(self, ended: Round, num_required: int) -> None:
        totals, workers, times, rounds = self._totals, self.workers, self.times, self.rounds
        now = totals.clock()
        assert ended.step is not None, "the round has ended"
        began = times[0] if times else now
        record = self._recorded(RoundRecord(ended.step, now, num_required, tuple(workers), tuple(times)))
        totals.rounds.observe(now - began)
        totals.gathering.observe(self._latest - began if times else 0.0)
        if len(times) > 1:
            totals.wait_for(workers[-1], self._latest - self._previous)
        self.num_rounds += 1
        self._unrated += 1
        if now - self._rated > _RATED_SECONDS:
            self._rate = self._faded(now)
            self._rated, self._unrated = now, 0
        num_dropped = len(rounds.pop(0).workers) if len(rounds) == KEPT_ROUNDS else 0
        rounds.append(record)
        workers.clear()
        times.clear()
        self._histories.has_more(self, len(record.workers) - num_dropped)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                self._LOG_LINE,
                self.key,
                len(record.workers),
                record.step,
                now - began,
                record.workers[-1] if record.workers else "",
                *((record.reason, record.apply_seconds) if record.reason else ()),
            )

    def _recorded(self, record: RoundRecord) -> RoundRecord:
        """Returns the record of the round that has just ended with all that is known of it."""
        return record

    def on_comparison(self, comparison: Comparison) -> None:
        self.num_compared = comparison.num_workers
        workers, before = comparison.different, self._different
        if workers == before:
            return
        self._different = workers
        if not workers:
            _log.info("accumulator %s: all workers have equal parameters again", self.key)
            return
        more = len(workers) - _MOST_NAMED
        named = "; ".join(
            f"{quoted(each.worker_id)} (equal at {'no step' if each.equal_at is None else f'step {each.equal_at}'})"
            for each in workers[:_MOST_NAMED]
        )
        _log.warning(
            "accumulator %s: workers have other parameters than most: %s%s",
            self.key,
            named,
            f" and {more} more" if more > 0 else "",
        )

    def on_drop(self) -> None:
        self.workers.clear()
        self.times.clear()

    def on_close(self) -> None:
        self._histories.remove(self)

    def waiting(self) -> AbstractContextManager[Wait]:
        return Waiting()

    @property
    def num_different(self) -> int:
        """The number of these workers whose parameters are not those of most."""
        return len(self._different)

    def forget_rounds(self) -> int:
        """Forgets the rounds; returns how many arrivals they had."""
        num_arrivals = self.num_kept
        self.rounds.clear()
        return num_arrivals

    @property
    def now(self) -> float:
        """The time of the histories' clock."""
        return self._totals.clock()

    @property
    def last_round_ended(self) -> float:
        """The time at which the last round ended; 0 if none is kept."""
        return self.rounds[-1].ended if self.rounds else 0.0

    @property
    def num_kept(self) -> int:
        """The number of arrivals in the kept rounds."""
        return sum([len(each.workers) for each in self.rounds])

    @property
    def rounds_per_second(self) -> float:
        """The recent number of rounds per second."""
        now = self._totals.clock()
        # Corrects the average for an accumulator that is younger than the time it covers.
        age = max(now - self._began, 1e-3)
        return self._faded(now) / -math.expm1(-age / _RATE_SECONDS)

    @property
    def median_round_seconds(self) -> float:
        """The median time from a round's first gradient to its end, over the kept rounds; 0 without any."""
        return median_seconds(self.rounds)

    def _faded(self, now: float) -> float:
        return self._rate * math.exp((self._rated - now) / _RATE_SECONDS) + self._unrated / _RATE_SECONDS

    def _add_late(self, contribution: Contribution, now: float) -> None:
        rounds = self.rounds
        if not rounds:
            return
        num_later = rounds[-1].step - contribution.local_step - 1
        self._totals.staleness.observe(num_later + 1.0)
        if 0 <= num_later < len(rounds):
            late = rounds[-1 - num_later]
            if late.step == contribution.local_step + 1:  # which is false after the step was set
                rounds[-1 - num_later] = late.with_late(tuple(contribution.workers), now)


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A round that has ended. Immutable, so other threads may read it. Times are in seconds, by `time.monotonic`.

    Attributes:
        step: The global_step that it led to.
        ended: When it ended.
        num_required: The number of gradients that it needed.
        workers: The ids of its gradients' senders in order of arrival; "" for a sender without an id.
        times: When these gradients arrived.
        late: Sender and time of each gradient for its step that arrived after its end, at most `MOST_LATE`.
        reason: Why a round of parameters ended; empty for other rounds.
        apply_seconds: The time that the optimizer of parameters took.
        staleness: How many versions had been made since the one from which each update was computed.
        metrics: The means of what the workers of parameters have measured.
    """

    step: int
    ended: float
    num_required: int
    workers: tuple[str, ...]
    times: tuple[float, ...]
    late: Sequence[tuple[str, float]] = ()
    reason: str = ""
    apply_seconds: float = 0.0
    staleness: tuple[int, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def began(self) -> float:
        """The time at which its first gradient arrived."""
        return self.times[0] if self.times else self.ended

    def with_late(self, worker_ids: Sequence[str], now: float) -> Self:
        """Returns the record with late gradients added, up to `MOST_LATE`."""
        room = MOST_LATE - len(self.late)
        return replace(self, late=(*self.late, *[(worker_id, now) for worker_id in worker_ids[:room]]))


def median_seconds(rounds: Sequence[RoundRecord]) -> float:
    """Returns the median time from a round's first gradient to its end; 0 without any rounds."""
    return median([each.ended - each.began for each in rounds]) if rounds else 0.0


@dataclass(slots=True, eq=False)
class Totals:
    """Counts of gradients and rounds since the server started, over all accumulators. Used on the event loop only.

    Attributes:
        clock: The time in seconds, as `time.monotonic`.
        accepted: The number of gradients that joined a round.
        stale: The number of gradients that arrived too late.
        duplicate: The number of gradients that had arrived before.
        refused: The number of gradients that were invalid or did not fit.
        not_finite: The number of these that had infinite values or NaN.
        accepted_bytes: The bytes of accepted gradients.
        stale_bytes: The bytes of stale gradients, which were wasted.
        rounds: Seconds from each round's first gradient to its end.
        gathering: Seconds from each round's first gradient to its last.
        staleness: How many steps late stale gradients were.
        waited_for: Seconds that rounds waited for their last gradient alone, by the worker that sent it. Workers beyond
            `MOST_WORKERS` count together as `OTHERS`.
    """

    clock: Callable[[], float]
    accepted: int = 0
    stale: int = 0
    duplicate: int = 0
    refused: int = 0
    not_finite: int = 0
    accepted_bytes: int = 0
    stale_bytes: int = 0
    rounds: Histogram = field(default_factory=lambda: Histogram(ROUND_SECONDS))
    gathering: Histogram = field(default_factory=lambda: Histogram(ROUND_SECONDS))
    staleness: Histogram = field(default_factory=lambda: Histogram(STEPS))
    waited_for: dict[str, float] = field(default_factory=dict)

    def copy(self) -> Self:
        """Returns the counts so far."""
        return replace(
            self,
            rounds=self.rounds.copy(),
            gathering=self.gathering.copy(),
            staleness=self.staleness.copy(),
            waited_for=dict(self.waited_for),
        )

    def wait_for(self, worker_id: str, seconds: float) -> None:
        """Counts how long a round waited for its last worker alone."""
        waited = self.waited_for
        if worker_id not in waited and len(waited) >= MOST_WORKERS:
            worker_id = OTHERS
        waited[worker_id] = waited.get(worker_id, 0.0) + seconds
