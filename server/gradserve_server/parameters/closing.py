"""The state machine that decides when a round ends, by its `RoundRules`.

A round ends

1. when `num_required` updates are in, and then `grace` has passed or all that are `expected` have come;
2. and not before `min_interval` after the previous round ended;
3. or `deadline` after its first update, if at least `min_required` updates are in. With fewer, it is overdue.

A round without updates never ends. `Closer` reads no clock. Its caller asks for a verdict after every change, when a
client leaves, and at the time that the last verdict named.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

from gradserve_server.parameters.round_rules import RoundRules, rules_of, rules_record
from gradserve_server.storage.journal import Record, record_of, value_of

_GAMMA = 0.8
_STEPS = 2.0
_SMOOTHING = 0.25
_MOST_GROWTH = 4.0
_LEAST_LIMIT = 4.0

Reason: TypeAlias = Literal["required", "grace", "expected", "deadline"]


@dataclass(frozen=True, slots=True)
class End:
    """The round is to end now.

    Attributes:
        reason: "required" if num_required updates were enough, "expected" if all that were expected have come, "grace"
            if the time for latecomers has passed, "deadline" if the round's time has.
    """

    reason: Reason


@dataclass(frozen=True, slots=True)
class Overdue:
    """The deadline has passed, and there are too few updates: waiting calls fail with these facts.

    Attributes:
        num_updates: The number of updates in the round.
        num_needed: The number with which it would have ended.
        came: The workers whose updates are in, in order of arrival.
        missing: The other workers of the last two rounds whose clients are still there, newest round first.
        gone: Those whose clients are gone.
    """

    num_updates: int
    num_needed: int
    came: tuple[str, ...]
    missing: tuple[str, ...]
    gone: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """The round goes on.

    Attributes:
        until: The time at which the verdict changes by itself, later than now; None if only an update can change it,
            or the end of a client that is expected.
    """

    until: float | None = None


Verdict: TypeAlias = End | Overdue | Wait


@dataclass(frozen=True, slots=True)
class SmoothedTimes:
    """Exponential moving averages of the durations of rounds, in seconds; each round counts for a quarter.

    Attributes:
        step_time: From the beginning of a round to an update, on average over its first num_required updates. Later
            ones do not count: a longer grace would let in later updates, which would make it longer still.
        time_to_quorum: From the beginning of a round to its num_required-th update.
        time_to_apply: The optimizer's time.
    """

    step_time: float
    time_to_quorum: float
    time_to_apply: float

    @property
    def grace(self) -> float:
        """The grace that follows, without its upper limit."""
        return max(_GAMMA * (_STEPS * self.step_time - self.time_to_quorum - self.time_to_apply), 0.0)

    def followed_by(self, latest: "SmoothedTimes") -> "SmoothedTimes":
        """Returns the averages after another round.

        A sample counts as at most four times the average, or four seconds: after a pause of hours, or a clock that was
        put forward by years, the averages are right again within a few rounds.
        """
        return SmoothedTimes(
            _smoothed(self.step_time, latest.step_time),
            _smoothed(self.time_to_quorum, latest.time_to_quorum),
            _smoothed(self.time_to_apply, latest.time_to_apply),
        )


def _smoothed(average: float, sample: float) -> float:
    return average + (min(sample, max(_MOST_GROWTH * average, _LEAST_LIMIT)) - average) * _SMOOTHING


class Closer:
    """Decides when the rounds of parameters end.

    Every method takes the time in seconds, of any clock. From it the closer keeps a clock of its own, which never goes
    back: when the caller's is set back, the closer's stands still until the next call and goes on from there. Time that
    the caller's clock skips has passed. So a jump ends no round that has no updates, and makes no round last longer
    than by its rules.

    An adaptive grace is 0.8 (2 step_time - time_to_quorum - time_to_apply), at least 0 and at most max_grace; see
    `SmoothedTimes`. It is max_grace until a round has been measured from its beginning to its end. The first one
    cannot be: its workers may start long after the parameters were created.

    "alive" expects each worker of the last two rounds whose client is still there. As long as no round has ended, or
    if one of the last two had an update without a worker_id, nobody knows who is still to come: the grace passes in
    full.

    The same calls give the same verdicts. Not thread-safe.
    """

    def __init__(self, rules: RoundRules, now: float) -> None:
        """Begins with an empty round."""
        self._rules = rules
        self._next_rules: RoundRules | None = None
        self._offset = now
        """The caller's time minus the closer's."""
        self._latest = now
        self._time = 0.0
        """The closer's time at the last call. All following times are the closer's."""
        self._previous_end: float | None = None
        self._smoothed: SmoothedTimes | None = None
        self._previous: dict[str, None] = {}
        """The workers of the previous round."""
        self._missing: dict[str, None] = {}
        """The workers of the last two rounds without those of this one, newest round first."""
        self._nameless = (False, False, False)
        """True if there were updates without a worker_id: in this round, the previous, and the one before that."""
        self._clear()

    def _clear(self) -> None:
        self._num_updates = 0
        self._came: dict[str, None] = {}
        self._quorum: float | None = None
        """The time at which num_required updates were in."""
        self._deadline_began: float | None = None
        """The time of the first update, or at which the deadline was missed last."""
        self._waited = 0.0
        """The sum of the times that the first num_required updates took, from the end of the previous round."""

    @property
    def rules(self) -> RoundRules:
        """The rules of the present round."""
        return self._rules

    @property
    def next_rules(self) -> RoundRules:
        """The rules of the next round."""
        return self._rules if self._next_rules is None else self._next_rules

    @property
    def num_updates(self) -> int:
        """The number of updates in the round."""
        return self._num_updates

    @property
    def came(self) -> Collection[str]:
        """The workers with an update in the round, in order of arrival."""
        return self._came.keys()

    @property
    def missing(self) -> Collection[str]:
        """The workers of the last two rounds without one, newest round first."""
        return self._missing.keys()

    @property
    def smoothed_times(self) -> SmoothedTimes | None:
        """The smoothed durations of earlier rounds; None until one was measured."""
        return self._smoothed

    @property
    def grace(self) -> float:
        """The grace of this round, in seconds."""
        if self._rules.grace != "adaptive":
            return self._rules.grace
        return self._rules.max_grace if self._smoothed is None else min(self._smoothed.grace, self._rules.max_grace)

    @property
    def latest(self) -> float:
        """The latest time that a caller has passed."""
        return self._latest

    def time(self, now: float) -> float:
        """Returns the closer's own time, in seconds since it was made, which never decreases.

        Events that record this time can be replayed with it: into a closer made at 0, or one made of a record at the
        record's "time". `resume` then goes on with a clock.
        """
        self._latest = now
        time = now - self._offset
        if time < self._time:
            self._offset = now - self._time
        else:
            self._time = time
        return self._time

    def resume(self, now: float) -> None:
        """Goes on with another clock, on which it is `now`: no time has passed since the last call."""
        self._latest = now
        self._offset = now - self._time

    def admit(self, now: float, worker_ids: Iterable[str], num_updates_after: int) -> None:
        """Counts an update that has joined the round, or a sum of several.

        Args:
            now: The time.
            worker_ids: The worker of each update; "" for one without a worker_id.
            num_updates_after: The number of updates that are now in the round, greater than before.
        """
        time = self.time(now)
        for worker_id in worker_ids:
            if worker_id:
                self._came[worker_id] = None
                self._missing.pop(worker_id, None)
            else:
                self._nameless = (True, *self._nameless[1:])
        if self._deadline_began is None:
            self._deadline_began = time
        num_required = self._rules.num_required
        if self._previous_end is not None and self._quorum is None:
            num_measured = min(num_updates_after, num_required) - self._num_updates
            self._waited += num_measured * (time - self._previous_end)
        self._num_updates = num_updates_after
        if self._quorum is None and num_updates_after >= num_required:
            self._quorum = time

    def verdict(self, now: float, is_alive: Callable[[str], bool]) -> Verdict:
        """Decides whether the round ends now.

        It stays as it is: the verdict is the same until the caller says that the round has ended, or that waiting calls
        have failed because it was overdue.

        Args:
            now: The time.
            is_alive: Returns True if the client of a worker is still there. Only asked for expected="alive", and for
                the diagnosis of a round that is overdue.
        """
        time = self.time(now)
        rules = self._rules
        if self._deadline_began is None:
            return Wait()
        turns = []
        if self._quorum is not None:
            reason, end = self._end_of_grace(is_alive)
            if self._previous_end is not None:
                end = max(end, self._previous_end + rules.min_interval)
            if _has_passed(end - time, now):
                return End(reason)
            turns.append(end)
        if rules.deadline is not None:
            end = self._deadline_began + rules.deadline
            if _has_passed(end - time, now):
                return End("deadline") if self._num_updates >= rules.least_required else self._overdue(is_alive)
            turns.append(end)
        return Wait(now + (min(turns) - time) if turns else None)

    def _end_of_grace(self, is_alive: Callable[[str], bool]) -> tuple[Reason, float]:
        assert self._quorum is not None
        if self._all_have_come(is_alive):
            return "expected", self._quorum
        grace = self.grace
        return ("grace" if grace else "required"), self._quorum + grace

    def _all_have_come(self, is_alive: Callable[[str], bool]) -> bool:
        expected = self._rules.expected
        if expected is None:
            return False
        if expected != "alive":
            return self._num_updates >= expected
        if self._previous_end is None or any(self._nameless[1:]):
            return False
        return not any(map(is_alive, self._missing))

    def _overdue(self, is_alive: Callable[[str], bool]) -> Overdue:
        missing: list[str] = []
        gone: list[str] = []
        for worker_id in self._missing:
            (missing if is_alive(worker_id) else gone).append(worker_id)
        return Overdue(self._num_updates, self._rules.least_required, tuple(self._came), tuple(missing), tuple(gone))

    def fail_deadline(self, now: float) -> None:
        """Begins the deadline again: the round was overdue, and calls that waited for it have failed."""
        time = self.time(now)
        if self._deadline_began is not None:
            self._deadline_began = time

    def end(self, now: float, apply_seconds: float) -> None:
        """Ends the round, and begins the next one, empty and with the newest rules.

        Args:
            now: The time at which the new version was ready.
            apply_seconds: The time that it took to apply the round, at least 0 and finite.
        """
        time = self.time(now)
        if self._previous_end is not None and self._quorum is not None:
            latest = SmoothedTimes(
                self._waited / self._rules.num_required, self._quorum - self._previous_end, apply_seconds
            )
            self._smoothed = latest if self._smoothed is None else self._smoothed.followed_by(latest)
        self._begin(time)

    def drop(self, now: float) -> None:
        """Begins the next round although this one has not ended: its updates were dropped, as other values were loaded.

        Its workers count as workers of one of the last two rounds; its times have no part in the smoothed ones.
        """
        self._begin(self.time(now))

    def _begin(self, time: float) -> None:
        self._missing = self._came | self._previous
        self._previous = self._came
        self._nameless = (False, *self._nameless[:2])
        self._previous_end = time
        self._rules, self._next_rules = self.next_rules, None
        self._clear()

    def change(self, rules: RoundRules) -> None:
        """Sets the rules of the next round; those of a round that has no updates yet change at once."""
        if self._deadline_began is None:
            self._rules, self._next_rules = rules, None
        else:
            self._next_rules = rules

    def record(self, now: float) -> Record:
        """Returns the closer in types that JSON has; the reverse of `of`. Its times are the closer's."""
        return {
            "time": self.time(now),
            "rules": rules_record(self._rules),
            "next_rules": None if self._next_rules is None else rules_record(self._next_rules),
            "previous_end": self._previous_end,
            "smoothed": None if self._smoothed is None else record_of(self._smoothed, {}),
            "previous": list(self._previous),
            "missing": list(self._missing),
            "nameless": list(self._nameless),
            "num_updates": self._num_updates,
            "came": list(self._came),
            "quorum": self._quorum,
            "deadline_began": self._deadline_began,
            "waited": self._waited,
        }

    @classmethod
    def of(cls, record: Record, now: float) -> Self:
        """Converts a record to a closer, for which no time has passed since the record was made.

        Raises:
            DAMAGES, InvalidArgumentError: It is no such record.
        """
        closer = cls(rules_of(record["rules"]), now)
        closer._next_rules = None if record["next_rules"] is None else rules_of(record["next_rules"])
        closer._time = float(record["time"])
        closer._previous_end = record["previous_end"]
        closer._smoothed = None if record["smoothed"] is None else value_of(SmoothedTimes, record["smoothed"], {})
        closer._previous = dict.fromkeys(record["previous"])
        closer._missing = dict.fromkeys(record["missing"])
        this, previous, before = record["nameless"]
        closer._nameless = (bool(this), bool(previous), bool(before))
        closer._num_updates = int(record["num_updates"])
        closer._came = dict.fromkeys(record["came"])
        closer._quorum = record["quorum"]
        closer._deadline_began = record["deadline_began"]
        closer._waited = float(record["waited"])
        closer.resume(now)
        return closer


def _has_passed(left: float, now: float) -> bool:
    """Returns True if so little is left that the caller's clock cannot show it: nobody could wait for that."""
    return now + left <= now
