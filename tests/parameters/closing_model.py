"""When a round ends, computed from everything that happened: a model of `Closer` that keeps no state but history."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce

from gradserve_server.parameters.round_rules import RoundRules


@dataclass
class Past:
    """A round that is over. Its times are step time, time to quorum and time to apply, if it was measured."""

    workers: list[str]
    end: float
    times: tuple[float, float, float] | None


@dataclass
class Model:
    """All that was said, on a clock that does not go back.

    Attributes:
        updates: Time and worker of each update of the round.
        retries: The times at which waiting calls were told that the round was overdue.
    """

    rules: RoundRules
    later: RoundRules | None = None
    now: float = 0.0
    updates: list[tuple[float, str]] = field(default_factory=list)
    retries: list[float] = field(default_factory=list)
    past: list[Past] = field(default_factory=list)

    def over(self, apply_seconds: float | None) -> None:
        """The round ended, or was dropped (None)."""
        needed = self.rules.num_required
        times = None
        if apply_seconds is not None and self.past and len(self.updates) >= needed:
            arrivals = [at - self.past[-1].end for at, _ in self.updates[:needed]]
            times = (sum(arrivals) / needed, arrivals[-1], apply_seconds)
        self.past.append(Past([worker for _, worker in self.updates], self.now, times))
        self.updates, self.retries = [], []
        self.rules, self.later = self.later or self.rules, None

    def grace(self) -> float:
        if self.rules.grace != "adaptive":
            return self.rules.grace
        measured = [each.times for each in self.past if each.times]
        if not measured:
            return self.rules.max_grace
        step, quorum, apply = (reduce(smoothed, column) for column in zip(*measured, strict=True))
        grace: float = 0.8 * (2 * step - quorum - apply)
        return min(max(grace, 0), self.rules.max_grace)

    def missing(self) -> list[str]:
        known = [worker for each in self.past[-1:-3:-1] for worker in each.workers]
        return [worker for worker in dict.fromkeys(known) if worker and worker not in [who for _, who in self.updates]]

    def all_came(self, is_alive: Callable[[str], bool]) -> bool:
        if isinstance(self.rules.expected, int):
            return len(self.updates) >= self.rules.expected
        nameless = any("" in each.workers for each in self.past[-2:])
        known = self.rules.expected == "alive" and bool(self.past) and not nameless
        return known and not [worker for worker in self.missing() if is_alive(worker)]

    def verdict(self, is_alive: Callable[[str], bool]) -> tuple[str, float | None]:
        """The reason to end, "overdue" or "wait", and how long to wait at most."""
        count, rules, ends = len(self.updates), self.rules, []
        if count >= rules.num_required:
            all_came, quorum = self.all_came(is_alive), self.updates[rules.num_required - 1][0]
            earliest = self.past[-1].end + rules.min_interval if self.past else 0.0
            ends.append(max(quorum if all_came else quorum + self.grace(), earliest))
            if ends[0] <= self.now:
                return "expected" if all_came else "grace" if self.grace() else "required", None
        if count and rules.deadline is not None:
            ends.append(max([self.updates[0][0], *self.retries]) + rules.deadline)
            if ends[-1] <= self.now:
                return "deadline" if count >= (rules.min_required or rules.num_required) else "overdue", None
        return "wait", min(ends) - self.now if ends else None


def smoothed(average: float, sample: float) -> float:
    return average + 0.25 * (min(sample, max(4 * average, 4)) - average)
