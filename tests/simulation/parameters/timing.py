"""When rounds of parameters may end, and when they must have ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gradserve_server.parameters.parameters import Parameters
from gradserve_server.parameters.record import RoundRecord
from gradserve_server.parameters.round_rules import RoundRules
from tests.simulation.clock import LONGEST_TICK, Moment
from tests.simulation.promises import check

_SLACK = 0.6
"""Seconds by which a time can be seen too late: an update counts from its arrival, but is there when it was written."""
_ROUNDING = 1e-6
_LATEST = 2.5
"""Seconds after which what was due must have happened, on an idle server."""


@dataclass(frozen=True)
class Time:
    """A time on the clocks of all servers together.

    Attributes:
        least: The seconds for which they were awake, the least that their clocks can have counted.
        most: The most that they can have counted.
    """

    least: float = 0.0
    most: float = 0.0


class Served:
    """Counts the time for which there was a server.

    Attributes:
        now: The time.
    """

    def __init__(self) -> None:
        self.now = Time()
        self._last: Moment | None = None
        self._suspended_at: float | None = None

    def begin(self, moment: Moment) -> None:
        """Notes that a server starts."""
        self._last = moment

    def look(self, moment: Moment) -> None:
        """Notes that time may have passed."""
        last, self._last = self._last, moment
        if last is None:
            return
        awake = (moment.now - moment.suspended) - (last.now - last.suspended)
        ticks = LONGEST_TICK * (moment.suspensions - last.suspensions)
        if ticks:
            self._suspended_at = self.now.least
        self.now = Time(self.now.least + awake, self.now.most + awake + ticks)

    @property
    def earliest(self) -> Time:
        """The time of something that was just seen, if it was written while the server was suspended."""
        since = self._suspended_at
        is_recent = since is not None and self.now.least - since < _SLACK
        return Time(self.now.least, self.now.most - LONGEST_TICK) if is_recent else self.now


@dataclass(eq=False)
class Timing:
    """The times of one round after the other, as they were seen.

    Attributes:
        served: The clock.
        round: The number of the round.
        first: When its first update was seen.
        enough: When it was first seen to have enough updates for its deadline.
        quorum: When it was first seen to have num_required updates.
        previous_end: When the round before was seen to end; None for the first one.
        previous_record: Its record; None if a load ended it.
        restarted: When a server has last started.
    """

    served: Served
    round: int = 1
    first: Time | None = None
    enough: Time | None = None
    quorum: Time | None = None
    previous_end: Time | None = None
    previous_record: RoundRecord | None = None
    restarted: Time = field(default_factory=Time)
    left: dict[int, tuple[float | None, float | None]] = field(default_factory=dict)
    """The rest of the grace and of the deadline when an update had come, by the number of updates."""

    def look(self, number: int, pending: Sequence[int], rules: RoundRules, parameters: Parameters) -> None:
        """Looks at a round after a change."""
        now = self.served.earliest
        if number != self.round:
            self.round, self.previous_end = number, now
            self.previous_record = parameters.newest.record
            self.first = self.enough = self.quorum = None
            self.left = {}
        if pending and self.first is None:
            self.first = now
        if len(pending) >= rules.least_required and self.enough is None:
            self.enough = now
        if len(pending) >= rules.num_required and self.quorum is None:
            self.quorum = now
        if pending and len(pending) not in self.left:
            late = self.served.now.most - now.most
            grace, deadline = _left(parameters)
            self.left[len(pending)] = (
                None if grace is None else grace + late,
                None if deadline is None else deadline + late,
            )
            before = [left for left, _ in self.left.values() if left is not None]
            is_less = grace is None or grace <= min(before) + _SLACK
            check(is_less, f"{parameters.name}: {before} s of the grace were left, and {grace} s after an update")

    def recovered(self, count: int, rules: RoundRules) -> None:
        """Notes that a server has started, which has found so many updates of those that were seen."""
        self.restarted = self.served.now
        if not count:
            self.first = None
        if count < rules.least_required:
            self.enough = None
        if count < rules.num_required:
            self.quorum = None
        self.left = {number: left for number, left in self.left.items() if number <= count}

    def check_left(self, pending: Sequence[int], parameters: Parameters, name: str) -> None:
        """Checks, after a crash, that no more time is left than when the last update had come."""
        before = self.left.get(len(pending))
        if not pending or before is None:
            return
        can_end = len(pending) >= parameters._ledger.closer.rules.least_required
        for what, most, left in zip(("grace", "deadline"), before, _left(parameters), strict=True):
            if what == "deadline" and not can_end:
                continue  # it may have been missed before, and is missed again at once
            known = left is None if most is None else left is not None and left <= most + _SLACK
            check(known, f"{name}: {most} s of its {what} were left, and {left} s after the crash")

    def check_end(self, record: RoundRecord, rules: RoundRules, name: str) -> None:
        """Checks the reason why a round ended."""
        count, reason, grace, expected = len(record.updates), record.reason, rules.grace, rules.expected
        if reason == "deadline":
            is_right = rules.deadline is not None and count >= rules.least_required
            begun, seconds = self.first, rules.deadline or 0.0
        else:
            is_right = count >= rules.num_required
            begun, seconds = self.quorum, 0.0
            if self.previous_record is not None:
                passed = (record.end_time - self.previous_record.end_time) / 1e9
                is_over = passed >= rules.min_interval - _ROUNDING
                check(is_over, f"{name}: it ended before its interval of {rules.min_interval} s, after {passed} s")
        if reason == "required":
            is_right &= grace == "adaptive" or not grace
        elif reason == "grace":
            is_right &= bool(grace)
            seconds = 0.0 if grace == "adaptive" else grace
        elif reason == "expected":
            is_right &= expected == "alive" or (expected is not None and count >= expected)
        check(is_right, f"{name}: it ended with {count} updates for reason {reason!r}, by {rules}")
        self._check_passed(begun or self.served.now, seconds, f"{name}: it ended before its {reason}")

    def check_due(self, count: int, rules: RoundRules, name: str) -> None:
        """Checks, while nothing happens, that a round that has to end has ended."""
        if self.quorum is not None:
            grace = rules.max_grace if rules.grace == "adaptive" else rules.grace
            is_due = self._has_passed(self.quorum, grace)
            if self.previous_end is not None:
                is_due &= self._has_passed(self.previous_end, rules.min_interval)
            check(not is_due, f"{name}: a round goes on with {count} updates, by {rules}")
        if self.enough is not None and rules.deadline is not None:
            is_due = self._has_passed(self.enough, rules.deadline)
            check(not is_due, f"{name}: a round goes on with {count} updates after its deadline, by {rules}")

    def _check_passed(self, begun: Time | None, seconds: float, message: str) -> None:
        if begun is not None:
            passed = self.served.now.most - begun.most
            check(passed >= seconds - _SLACK, f"{message} of {seconds} s, after {passed:.3f} s")

    def _has_passed(self, begun: Time, seconds: float) -> bool:
        begun_here = max(begun.least, self.restarted.least)  # what passed between the last event and a crash is lost
        return self.served.now.least - begun_here > seconds + _LATEST


def _left(parameters: Parameters) -> tuple[float | None, float | None]:
    """Returns the seconds that are left of the grace and of the deadline; None if they do not run."""
    closer = parameters._ledger.closer
    quorum, began, deadline = closer._quorum, closer._deadline_began, closer.rules.deadline
    return (
        None if quorum is None else quorum + closer.grace - closer._time,
        None if began is None or deadline is None else began + deadline - closer._time,
    )
