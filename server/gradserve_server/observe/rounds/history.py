"""What has happened to one accumulator."""

import logging
import math
import sys
from contextlib import AbstractContextManager
from typing import Protocol

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.observer import Wait
from gradserve_server.accumulators.rounds import Outcome, Round
from gradserve_server.observe.call_record import Waiting
from gradserve_server.observe.rounds.record import RoundRecord, median_seconds
from gradserve_server.observe.rounds.totals import Totals
from gradserve_server.resources.registry import ResourceKey

_log = logging.getLogger("gradserve_server.rounds")

KEPT_ROUNDS = 20
_MOST_ARRIVALS = 1000
"""Gradients of one round that are kept one by one; of further ones, the latest."""
_RATE_SECONDS = 10.0
"""The rate of rounds is an average over about this time."""
_RATED_SECONDS = 0.1
"""Rounds that end sooner after others are added to the rate together with them."""


class Keeper(Protocol):
    """Bounds the memory of the rounds of all accumulators."""

    def has_more(self, history: "History", num_arrivals: int) -> None:
        """Notes that a round of an accumulator has begun or ended, and how many more arrivals are kept since."""
        ...

    def remove(self, history: "History") -> None:
        """Forgets an accumulator that is gone."""
        ...


class History:
    """An `AccumulatorObserver`: counts, the rate of rounds, and the last rounds.

    Attributes:
        key: The container and name of the accumulator.
        accepted: The number of gradients that joined a round.
        stale: The number of those that came too late.
        duplicate: The number of those that were there already: of the same worker, or of a call that came again.
        refused: The number of those that were not valid, or for which there was no room.
        num_rounds: The number of rounds that have ended since the server started.
        rounds: The last of them.
        workers: The senders in the current round, in order of arrival.
        times: When their gradients arrived, by `time.monotonic`.
    """

    __slots__ = (
        "_began",
        "_keeper",
        "_latest",
        "_previous",
        "_rate",
        "_rated",
        "_totals",
        "_unrated",
        "accepted",
        "duplicate",
        "key",
        "num_rounds",
        "refused",
        "rounds",
        "stale",
        "times",
        "workers",
    )

    def __init__(self, key: ResourceKey, totals: Totals, keeper: Keeper) -> None:
        """Takes the key of the accumulator, the counts of all accumulators, and what bounds the memory."""
        self.key = key
        self._totals = totals
        self._keeper = keeper
        self.accepted = self.stale = self.duplicate = self.refused = self.num_rounds = 0
        self.rounds: list[RoundRecord] = []  # an empty deque takes ten times the memory
        self.workers: list[str] = []
        self.times: list[float] = []
        self._latest = self._previous = self._rate = 0.0
        self._unrated = 0
        self._began = self._rated = totals.clock()

    def on_answer(self, contribution: Contribution, outcome: Outcome, num_bytes: int) -> None:
        """See `AccumulatorObserver`."""
        totals = self._totals
        now = totals.clock()
        if outcome is Outcome.ACCEPTED:
            self.accepted += contribution.num_gradients
            totals.accepted += contribution.num_gradients
            totals.accepted_bytes += num_bytes
            if not self.rounds and not self.times:
                self._keeper.has_more(self, 0)
            self._previous, self._latest = self._latest, now
            for worker_id in contribution.workers:
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
        """See `AccumulatorObserver`."""
        self.duplicate += 1
        self._totals.duplicate += 1

    def on_refusal(self) -> None:
        """See `AccumulatorObserver`."""
        self.refused += 1
        self._totals.refused += 1

    def on_round_end(self, ended: Round, num_required: int) -> None:
        """See `AccumulatorObserver`."""
        totals, workers, times, rounds = self._totals, self.workers, self.times, self.rounds
        now = totals.clock()
        assert ended.step is not None, "the round has ended"
        began = times[0] if times else now
        record = RoundRecord(ended.step, now, num_required, tuple(workers), tuple(times))
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
        self._keeper.has_more(self, len(record.workers) - num_dropped)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "%s: %d gradients led to step %d after %.6f s; the last one was from %r",
                self.key,
                len(record.workers),
                record.step,
                now - began,
                record.workers[-1] if record.workers else "",
            )

    def on_close(self) -> None:
        """See `AccumulatorObserver`."""
        self._keeper.remove(self)

    def waiting(self) -> AbstractContextManager[Wait]:
        """See `AccumulatorObserver`."""
        return Waiting()

    def forget_rounds(self) -> int:
        """Forgets the last rounds; returns the number of their arrivals."""
        num_arrivals = self.num_kept
        self.rounds.clear()
        return num_arrivals

    @property
    def last_round_ended(self) -> float:
        """When the last round ended; 0 if none is kept."""
        return self.rounds[-1].ended if self.rounds else 0.0

    @property
    def num_kept(self) -> int:
        """The number of arrivals in the rounds that are kept."""
        return sum([len(each.workers) for each in self.rounds])

    @property
    def rounds_per_second(self) -> float:
        """The number of rounds per second, lately."""
        now = self._totals.clock()
        # An average over the last seconds; a young accumulator has not had that many.
        age = max(now - self._began, 1e-3)
        return self._faded(now) / -math.expm1(-age / _RATE_SECONDS)

    @property
    def median_round_seconds(self) -> float:
        """The median time from the first gradient of a round to its end, of the rounds that are kept; 0 without any."""
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
            if late.step == contribution.local_step + 1:  # unless the step was set
                rounds[-1 - num_later] = late.with_late(tuple(contribution.workers), now)
