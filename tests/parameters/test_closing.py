"""When a round ends: every rule of RoundRules, and random histories against a model."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.parameters.closing import Closer, End, Overdue, SmoothedTimes, Verdict, Wait
from gradserve_server.parameters.round_rules import RoundRules, rules_of, rules_record
from tests.parameters.closing_model import Model
from tests.together import together

YEARS = 1e9


def everybody(_worker: str) -> bool:
    return True


class Script:
    """Drives a closer by one line for each thing that happens, and says what it decides.

    "3 a b": the updates of a and b join at 3 s. "3 ?": the verdict. "3 end": the round ends, applied in no time.
    """

    def __init__(self, rules: RoundRules, alive: Callable[[str], bool] = everybody) -> None:
        self.closer = Closer(rules, 0.0)
        self.alive = alive

    def ask(self, now: float) -> Verdict:
        return self.closer.verdict(now, self.alive)

    def play(self, script: str) -> Verdict:
        """Plays lines separated by ";"; returns the last verdict."""
        verdict: Verdict = Wait()
        for line in script.split(";"):
            at, *words = line.split()
            now = float(at)
            if words == ["?"]:
                verdict = self.ask(now)
            elif words == ["end"]:
                assert isinstance(self.ask(now), End), line
                self.closer.end(now, 0.0)
            elif words == ["drop"]:
                self.closer.drop(now)
            elif words == ["fail"]:
                assert isinstance(self.ask(now), Overdue), line
                self.closer.fail_deadline(now)
            else:
                for word in words:
                    self.closer.admit(now, ["" if word == "_" else word], self.closer.num_updates + 1)
        return verdict


# Rules

TWO = RoundRules(2)
GRACE = RoundRules(2, grace=5.0)
INTERVAL = RoundRules(2, min_interval=10.0)
DEADLINE = RoundRules(3, deadline=10.0)
AT_LEAST_2 = RoundRules(3, min_required=2, deadline=10.0)
EXPECT_3 = RoundRules(2, expected=3, grace=5.0)
ALIVE = RoundRules(2, expected="alive", grace=5.0)
EVERYTHING = RoundRules(2, min_required=1, expected=3, grace=5.0, min_interval=8.0, deadline=20.0)

CASES: list[tuple[RoundRules, str, Verdict]] = [
    # num_required
    (TWO, "0 ?", Wait()),
    (TWO, "0 a; 0 ?", Wait()),
    (TWO, "0 a; 1e6 ?", Wait()),
    (TWO, "0 a; 3 b; 3 ?", End("required")),
    (TWO, "0 a b c; 9 ?", End("required")),
    (RoundRules(1), "0 a; 0 ?", End("required")),
    # a fixed grace begins with the quorum
    (GRACE, "0 a; 3 ?", Wait()),
    (GRACE, "0 a; 3 b; 3 ?", Wait(8.0)),
    (GRACE, "0 a; 3 b; 7.5 ?", Wait(8.0)),
    (GRACE, "0 a; 3 b; 8 ?", End("grace")),
    # latecomers join, and do not make it longer
    (GRACE, "0 a; 3 b; 7 c d; 7 ?", Wait(8.0)),
    (GRACE, "0 a; 3 b; 7 c; 8 ?", End("grace")),
    # min_interval begins with the end of the previous round; the first has none before it
    (INTERVAL, "1 a b; 1 ?", End("required")),
    (INTERVAL, "1 a b; 1 end; 2 a b; 2 ?", Wait(11.0)),
    (INTERVAL, "1 a b; 1 end; 2 a b; 11 ?", End("required")),
    (INTERVAL, "1 a b; 1 end; 2 a; 12 b; 12 ?", End("required")),
    (INTERVAL, "1 a b; 1 end; 12 ?", Wait()),
    (replace(GRACE, min_interval=3.0), "0 a b; 5 end; 6 a b; 6 ?", Wait(11.0)),
    (replace(GRACE, min_interval=8.0), "0 a b; 5 end; 6 a b; 6 ?", Wait(13.0)),
    # deadline begins with the first update
    (DEADLINE, "0 ?; 100 ?", Wait()),
    (DEADLINE, "4 a; 4 ?", Wait(14.0)),
    (DEADLINE, "4 a; 9 b; 9 ?", Wait(14.0)),
    (DEADLINE, "4 a; 9 b; 14 ?", Overdue(2, 3, ("a", "b"), (), ())),
    (DEADLINE, "4 a; 9 b; 14 c; 14 ?", End("required")),
    (DEADLINE, "4 a _; 14 ?", Overdue(2, 3, ("a",), (), ())),
    # it begins again when waiting calls have failed, and the updates stay
    (DEADLINE, "4 a; 9 b; 14 ?; 15 ?", Overdue(2, 3, ("a", "b"), (), ())),
    (DEADLINE, "4 a; 9 b; 15 fail; 15 ?", Wait(25.0)),
    (DEADLINE, "4 a; 9 b; 15 fail; 16 c; 16 ?", End("required")),
    (DEADLINE, "4 a; 15 fail; 25 ?", Overdue(1, 3, ("a",), (), ())),
    # with min_required, the round ends at its deadline
    (AT_LEAST_2, "4 a; 9 b; 9 ?", Wait(14.0)),
    (AT_LEAST_2, "4 a; 9 b; 14 ?", End("deadline")),
    (AT_LEAST_2, "4 a; 14 ?", Overdue(1, 2, ("a",), (), ())),
    (AT_LEAST_2, "4 a; 14 fail; 15 b; 15 ?", Wait(24.0)),
    (AT_LEAST_2, "4 a; 14 fail; 15 b; 24 ?", End("deadline")),
    # who is missing: the workers of the last two rounds
    (DEADLINE, "0 a b c; 0 end; 1 d; 11 ?", Overdue(1, 3, ("d",), ("a", "b", "c"), ())),
    (DEADLINE, "0 a b c; 0 end; 0 c d e; 0 end; 1 d; 11 ?", Overdue(1, 3, ("d",), ("c", "e", "a", "b"), ())),
    (DEADLINE, "0 a b c; 0 end; 0 b c d; 0 end; 0 b c d; 0 end; 1 d; 11 ?", Overdue(1, 3, ("d",), ("b", "c"), ())),
    # the deadline cuts a grace that began late
    (replace(GRACE, deadline=6.0), "0 a; 4 b; 4 ?", Wait(6.0)),
    (replace(GRACE, deadline=6.0), "0 a; 4 b; 6 ?", End("deadline")),
    # a number of expected updates
    (EXPECT_3, "0 a; 3 b; 3 ?", Wait(8.0)),
    (EXPECT_3, "0 a; 3 b; 4 c; 4 ?", End("expected")),
    (EXPECT_3, "0 a; 3 b; 8 ?", End("grace")),
    (replace(EXPECT_3, expected=2), "0 a; 3 b; 3 ?", End("expected")),
    (replace(EXPECT_3, min_interval=9.0), "0 a b c; 0 end; 1 a b c; 1 ?", Wait(9.0)),
    (replace(EXPECT_3, min_interval=9.0), "0 a b c; 0 end; 1 a b c; 9 ?", End("expected")),
    # everyone who is alive: nobody is known in the first round, so its grace passes in full
    (ALIVE, "0 a b c; 0 ?", Wait(5.0)),
    (ALIVE, "0 a b c; 5 end; 6 a b; 6 ?", Wait(11.0)),
    (ALIVE, "0 a b c; 5 end; 6 a b; 7 c; 7 ?", End("expected")),
    (ALIVE, "0 a b c; 5 end; 6 a b; 11 ?", End("grace")),
    (ALIVE, "0 a b c; 5 end; 6 a c d; 6 ?", Wait(11.0)),  # a newcomer is nobody else
    (ALIVE, "0 a b; 5 end; 6 a b c; 6 end; 7 a b; 7 ?", Wait(12.0)),  # and is expected from then on
    (ALIVE, "0 a b c; 5 end; 6 a b; 11 end; 12 a b; 12 ?", Wait(17.0)),  # for two rounds
    (ALIVE, "0 a b c; 5 end; 6 a b; 11 end; 12 a b; 17 end; 18 a b; 18 ?", End("expected")),
    (ALIVE, "0 a b _; 5 end; 6 a b; 6 ?", Wait(11.0)),  # somebody nameless may come
    (ALIVE, "0 a b _; 5 end; 6 a b; 11 end; 12 a b; 12 ?", Wait(17.0)),
    (ALIVE, "0 a b _; 5 end; 6 a b; 11 end; 12 a b; 17 end; 18 a b; 18 ?", End("expected")),
    (ALIVE, "0 a b; 5 end; 6 a b _; 6 ?", End("expected")),  # somebody nameless has come
    (ALIVE, "0 a b c; 5 end; 6 c; 6 ?", Wait()),  # all that are expected are no quorum
    # all rules at once
    (EVERYTHING, "0 a; 20 ?", End("deadline")),
    (EVERYTHING, "0 a b c; 0 ?", End("expected")),
    (EVERYTHING, "0 a b c; 0 end; 1 a b c; 1 ?", Wait(8.0)),
    (EVERYTHING, "0 a b c; 0 end; 1 a b; 1 ?", Wait(8.0)),
    (EVERYTHING, "0 a b c; 0 end; 4 a b; 4 ?", Wait(9.0)),
    # a round that is dropped, because values were loaded, begins again with nothing
    (GRACE, "0 a b; 1 drop; 5 ?", Wait()),
    (GRACE, "0 a b; 1 drop; 2 a b; 2 ?", Wait(7.0)),
    (INTERVAL, "0 a b; 1 drop; 2 a b; 2 ?", Wait(11.0)),
    (ALIVE, "0 a b c; 1 drop; 2 a b; 3 c; 3 ?", End("expected")),
]


@together("rules, script, verdict", *zip(*CASES, strict=True))
def test_the_end_of_a_round(rules: RoundRules, script: str, verdict: Verdict) -> None:
    assert Script(rules).play(script) == verdict


def test_workers_whose_clients_are_gone_are_not_expected() -> None:
    gone: set[str] = set()
    script = Script(ALIVE, lambda worker: worker not in gone)
    assert script.play("0 a b c d; 5 end; 6 a b; 6 ?") == Wait(11.0)
    gone |= {"c"}
    assert script.ask(7) == Wait(11.0)
    gone |= {"d"}
    assert script.ask(7) == End("expected")
    gone -= {"c"}
    assert script.ask(7) == Wait(11.0)


def test_the_diagnosis_tells_slow_workers_from_those_that_are_gone() -> None:
    script = Script(DEADLINE, lambda worker: worker != "b")
    assert script.play("0 a b c; 0 end; 1 a; 11 ?") == Overdue(1, 3, ("a",), ("c",), ("b",))


def test_a_sum_of_several_updates_counts_as_all_of_them() -> None:
    closer = Closer(RoundRules(3, expected="alive", grace=5.0), 0.0)
    closer.admit(1, ["a", "b"], 2)
    assert closer.verdict(1, everybody) == Wait()
    closer.admit(2, ["c", "d"], 4)
    assert closer.verdict(2, everybody) == Wait(7.0)
    closer.end(7, 0.0)
    closer.admit(8, ["a", "b", "c", "d"], 4)
    assert closer.verdict(8, everybody) == End("expected")


# Adaptive grace

ADAPTIVE = RoundRules(2, grace="adaptive", max_grace=30.0)


def rounds(closer: Closer, *arrivals: tuple[float, ...], apply: float = 0.0, start: float = 0.0) -> float:
    """Plays whole rounds, given when their updates arrive after their beginnings; returns the end of the last."""
    now = start
    for each in arrivals:
        for number, after in enumerate(each):
            closer.admit(now + after, [f"w{number}"], number + 1)
        verdict = closer.verdict(now + each[-1], everybody)
        now = verdict.until if isinstance(verdict, Wait) and verdict.until is not None else now + each[-1]
        assert isinstance(closer.verdict(now, everybody), End)
        closer.end(now, apply)
    return now


def test_adaptive_grace_is_max_grace_until_a_round_was_measured() -> None:
    closer = Closer(ADAPTIVE, 0.0)
    assert closer.grace == 30
    now = rounds(closer, (1000.0, 1001.0))  # workers may start long after the parameters were created
    assert (now, closer.grace, closer.smoothed_times) == (1031, 30, None)
    rounds(closer, (2.0, 4.0), apply=0.5, start=now)
    assert closer.smoothed_times == SmoothedTimes(3.0, 4.0, 0.5)
    assert closer.grace == 0.8 * (2 * 3 - 4 - 0.5)


@together(
    "times, grace",
    [
        SmoothedTimes(10.0, 10.0, 0.0),
        SmoothedTimes(10.0, 12.0, 1.0),
        SmoothedTimes(10.0, 15.0, 5.0),  # nothing is left
        SmoothedTimes(10.0, 25.0, 5.0),  # less than nothing is left
        SmoothedTimes(1000.0, 1000.0, 0.0),
    ],
    [8.0, 0.8 * 7, 0.0, 0.0, 30.0],
)
def test_adaptive_grace(times: SmoothedTimes, grace: float) -> None:
    script = Script(ADAPTIVE)
    script.closer = Closer.of(script.closer.record(0) | {"smoothed": smoothed_record(times)}, 0.0)
    assert script.closer.grace == grace
    assert script.play("0 a b; 0 ?") == (Wait(grace) if grace else End("required"))
    assert script.ask(grace) == End("grace" if grace else "required")


def smoothed_record(times: SmoothedTimes) -> dict[str, float]:
    return {name: getattr(times, name) for name in ("step_time", "time_to_quorum", "time_to_apply")}


@together(
    "average, sample, expected",
    *zip((8.0, 12.0, 9.0), (8.0, 0.0, 6.0), (8.0, 32.0, 14.0), (8.0, 1e9, 14.0), (0.5, 1e9, 1.375), strict=True),
)
def test_smoothing(average: float, sample: float, expected: float) -> None:
    before, latest = (SmoothedTimes(seconds, 2 * seconds, 3 * seconds) for seconds in (average, sample))
    assert before.followed_by(latest).step_time == expected


def test_a_sum_counts_for_the_smoothed_times_up_to_the_quorum() -> None:
    closer = Closer(ADAPTIVE, 0.0)
    now = rounds(closer, (1.0, 1.0))
    closer.admit(now + 1, ["a"], 1)
    closer.admit(now + 3, ["b", "c", "d"], 4)
    closer.admit(now + 9, ["e"], 5)
    closer.end(now + 99, 0.5)
    assert closer.smoothed_times == SmoothedTimes(2.0, 3.0, 0.5)


def test_a_longer_grace_does_not_lengthen_the_next() -> None:
    """Only the updates of the quorum are measured: three punctual workers and a slow one that uses all of its grace."""
    closer = Closer(replace(ADAPTIVE, num_required=3, max_grace=60.0), 0.0)
    now = rounds(closer, (1.0, 1.0, 1.0, 1.5))
    for _ in range(50):
        now = rounds(closer, (10.0, 10.0, 10.0, 17.0), start=now)
    assert closer.grace == pytest.approx(8.0)


def test_a_pause_is_forgotten_within_a_few_rounds() -> None:
    closer = Closer(replace(ADAPTIVE, max_grace=3600.0), 0.0)
    now = rounds(closer, (1.0, 1.0), *[(10.0, 10.0)] * 20)
    assert closer.grace == pytest.approx(8.0)
    now = rounds(closer, (YEARS, YEARS), start=now)
    assert closer.grace <= 15
    rounds(closer, *[(10.0, 10.0)] * 6, start=now)
    assert closer.grace <= 9.1


def test_real_changes_are_followed() -> None:
    closer = Closer(replace(ADAPTIVE, max_grace=3600.0), 0.0)
    rounds(closer, (1.0, 1.0), *[(1.0, 1.0)] * 20, *[(100.0, 100.0)] * 20)
    assert closer.grace == pytest.approx(80.0, rel=0.05)


def test_rounds_that_ended_without_a_quorum_are_not_measured() -> None:
    script = Script(replace(ADAPTIVE, min_required=1, deadline=5.0))
    script.play("0 a b; 5 end; 6 a; 11 ?; 11 end")
    assert script.closer.smoothed_times is None


# Clocks


@pytest.mark.parametrize("jump", [YEARS, -YEARS])
@pytest.mark.parametrize("rules", [TWO, GRACE, INTERVAL, AT_LEAST_2, ALIVE, EVERYTHING, ADAPTIVE])
def test_a_jump_ends_no_empty_round(rules: RoundRules, jump: float) -> None:
    script = Script(rules)
    assert script.play(f"5 ?; {5 + jump} ?; 5 ?; {5 + jump} ?") == Wait()
    now = 5 + jump
    script.closer.admit(now, ["a", "b", "c"], 3)
    verdict = script.ask(now)
    if isinstance(verdict, Wait):
        assert verdict.until is not None
        now = verdict.until
    assert isinstance(script.ask(now), End)
    script.closer.end(now, 0.0)
    assert script.play(f"{now} ?; {now + jump} ?; {now - jump} ?; {now + 2 * jump} ?") == Wait()


@together(
    "rules, script, verdict",
    *zip(
        # set back: what was left before is left after
        (GRACE, "100 a b; 102 ?; 7 ?", Wait(10.0)),
        (GRACE, "100 a b; 102 ?; 7 ?; 10 ?", End("grace")),
        (GRACE, f"100 a b; 102 ?; {-YEARS} ?; {3 - YEARS} ?", End("grace")),
        (INTERVAL, "100 a b; 100 end; 104 a b; 7 ?", Wait(13.0)),
        (DEADLINE, "100 a; 108 b; 50 ?", Wait(52.0)),
        (DEADLINE, "100 a; 108 b; 50 ?; 52 ?", Overdue(2, 3, ("a", "b"), (), ())),
        # again and again: each time it goes on
        (GRACE, "9 a b; 10 ?; 9 ?; 10 ?; 9 ?; 10 ?; 9 ?; 10 ?; 9 ?; 10 ?", End("grace")),
        # put forward: the time has passed, once
        (GRACE, f"0 a b; {YEARS} ?", End("grace")),
        (DEADLINE, f"0 a b; {YEARS} ?", Overdue(2, 3, ("a", "b"), (), ())),
        (DEADLINE, f"0 a b; {YEARS} fail; {YEARS} ?", Wait(YEARS + 10)),
        (AT_LEAST_2, f"0 a b; {YEARS} ?", End("deadline")),
        (INTERVAL, f"0 a b; 0 end; {YEARS} a; {YEARS} ?", Wait()),
        strict=True,
    ),
)
def test_a_clock_that_jumps(rules: RoundRules, script: str, verdict: Verdict) -> None:
    assert Script(rules).play(script) == verdict


@pytest.mark.parametrize("now", [0.0, 0.1, 1e3 / 3, 1.7e9, 1e15, 2.0**60])
@pytest.mark.parametrize("grace", [1e-12, 1e-9, 0.1, 1 / 3, 1e3 / 7, 1e11])
def test_whoever_wakes_up_when_told_does_not_wait_again_and_again(now: float, grace: float) -> None:
    closer = Closer(RoundRules(1, grace=grace), now)
    closer.admit(now, ["a"], 1)
    for _ in range(3):
        verdict = closer.verdict(now, everybody)
        if not isinstance(verdict, Wait):
            break
        assert verdict.until is not None
        assert verdict.until > now
        now = verdict.until
    assert closer.verdict(now, everybody) == End("grace")


@pytest.mark.parametrize("now", [0.0, 1e3 / 3, 1.7e9, 1e12])
def test_whoever_has_failed_waiting_calls_does_not_have_to_again_at_once(now: float) -> None:
    closer = Closer(RoundRules(2, deadline=0.001), now)
    closer.admit(now, ["a"], 1)
    assert isinstance(closer.verdict(now, everybody), Wait)
    now += 1
    assert isinstance(closer.verdict(now, everybody), Overdue)
    closer.fail_deadline(now)
    assert isinstance(closer.verdict(now, everybody), Wait)


# Changes, restarts


def test_new_rules_hold_from_the_next_round_on() -> None:
    script = Script(GRACE)
    script.play("0 a")
    script.closer.change(RoundRules(1))
    assert (script.closer.rules, script.closer.next_rules) == (GRACE, RoundRules(1))
    assert script.play("1 ?; 2 b; 2 ?") == Wait(7.0)
    script.closer.change(RoundRules(3))  # the latest change counts
    assert script.play("7 end; 8 a b; 8 ?") == Wait()
    assert script.closer.rules == RoundRules(3)


def test_new_rules_hold_at_once_if_there_is_no_update() -> None:
    script = Script(GRACE)
    script.closer.change(RoundRules(1))
    assert script.play("0 a; 0 ?; 0 end") == End("required")
    script.closer.change(TWO)
    assert script.play("1 a; 1 ?") == Wait()


@together(
    "rules, script, before, after",
    *zip(
        # down for a year, on a clock that begins at 1000
        (GRACE, "0 a; 3 b; 5 ?", Wait(8.0), Wait(1003.0)),
        (DEADLINE, "4 a; 9 b; 9 ?", Wait(14.0), Wait(1005.0)),
        (DEADLINE, "4 a; 14 fail; 15 ?", Wait(24.0), Wait(1009.0)),
        (INTERVAL, "0 a b; 0 end; 1 a b; 4 ?", Wait(10.0), Wait(1006.0)),
        (TWO, "0 a; 4 ?", Wait(), Wait()),
        (ALIVE, "0 a b c; 5 end; 6 a b; 7 ?", Wait(11.0), Wait(1004.0)),
        (EXPECT_3, "0 a b c; 1 ?", End("expected"), End("expected")),
        (AT_LEAST_2, "0 a; 9 ?; 10 ?", Overdue(1, 2, ("a",), (), ()), Overdue(1, 2, ("a",), (), ())),
        strict=True,
    ),
)
def test_what_was_left_of_times_is_left_after_a_restart(
    rules: RoundRules, script: str, before: Verdict, after: Verdict
) -> None:
    run = Script(rules)
    assert run.play(script) == before
    record = json.loads(json.dumps(run.closer.record(float(script.rsplit(";", 1)[1].split()[0])), allow_nan=False))
    assert Closer.of(record, 1000.0).verdict(1000.0, everybody) == after


def test_changes_that_are_to_come_survive_a_restart() -> None:
    script = Script(GRACE)
    script.play("0 a b")
    script.closer.change(RoundRules(1))
    script.closer = Closer.of(script.closer.record(0), 0.0)
    assert script.play("0 ?; 5 end; 6 a; 6 ?") == End("required")


def test_events_with_the_closers_time_can_be_replayed() -> None:
    """On top of a record, too: the times of rules are right to the bit, whatever the clocks were."""
    live = Closer(replace(ADAPTIVE, min_interval=1.0), 1e9 + 0.1)
    replayed, on_record = Closer(live.rules, 0.0), None
    now = 1e9 + 0.1
    for number in range(40):
        now += (0.3, 0.1, -5.0, 0.7)[number % 4]
        at = live.time(now)
        if number % 2:
            verdict = live.verdict(now, everybody)
            if isinstance(verdict, End):
                for closer in filter(None, (replayed, on_record)):
                    closer.end(at, 0.25)
                live.end(now, 0.25)
        else:
            count = live.num_updates + 1
            for closer in filter(None, (replayed, on_record)):
                closer.admit(at, [f"w{count}"], count)
            live.admit(now, [f"w{count}"], count)
        if number == 11:
            record = live.record(now)
            on_record = Closer.of(record, record["time"])
    assert live.num_updates
    assert live.smoothed_times is None or live.smoothed_times.step_time > 0
    at = live.time(now)
    assert on_record is not None
    assert live.record(now) == replayed.record(at) == on_record.record(at)
    assert (live.latest, replayed.latest) == (now, at)
    replayed.resume(5.0)
    assert replayed.latest == 5
    assert replayed.time(7.0) == at + 2


@together(
    "wrong",
    [
        {"time": None},
        {"rules": {"num_required": 0}},
        {"rules": {"number": 1}},
        {"smoothed": {"step_time": 1.0}},
        {"nameless": [False]},
        {"num_updates": "many"},
    ],
)
def test_damaged_records(wrong: dict[str, Any]) -> None:
    record = Closer(GRACE, 0.0).record(0.0)
    with pytest.raises((ValueError, TypeError, LookupError, InvalidArgumentError)):
        Closer.of(record | wrong, 0.0)
    with pytest.raises(LookupError):
        Closer.of({name: value for name, value in record.items() if name not in wrong}, 0.0)


# Validation

INF, NAN = math.inf, math.nan


@together(
    "values, field, message",
    *zip(
        ({"num_required": 0}, "num_required", "expected num_required of at least 1, got 0"),
        ({"num_required": -1}, "num_required", "got -1"),
        ({"min_required": 0, "deadline": 9.0}, "min_required", "from 1 to num_required, which is 2, got 0"),
        ({"min_required": 3, "deadline": 9.0}, "min_required", "got 3"),
        ({"min_required": 1}, "min_required", "ends with fewer than num_required updates only at its deadline"),
        ({"expected": 1, "grace": 1.0}, "expected", "at least num_required, which is 2, .*, got 1"),
        ({"expected": 3}, "expected", "without a grace"),
        ({"expected": "alive"}, "expected", "without a grace"),
        ({"grace": -1.0}, "grace", "from 0 to 315576000000 seconds .*, got -1"),
        ({"grace": NAN}, "grace", "got nan"),
        ({"grace": INF}, "grace", "got inf"),
        ({"grace": 4e11}, "grace", "got 4e"),
        ({"grace": "adaptive", "max_grace": 0.0}, "max_grace", "for no grace, set grace to 0"),
        ({"grace": "adaptive", "max_grace": NAN}, "max_grace", "got nan"),
        ({"grace": 1.0, "max_grace": 5.0}, "max_grace", "only with grace='adaptive', got 5"),
        ({"max_grace": INF}, "max_grace", "got inf"),
        ({"min_interval": -0.5}, "min_interval", "got -0.5"),
        ({"min_interval": NAN}, "min_interval", "got nan"),
        ({"deadline": 0.0}, "deadline", "at least 0.001 s, got 0 s: .*overdue at their first update"),
        ({"deadline": 0.0009}, "deadline", "got 0.0009 s"),
        ({"deadline": -1.0}, "deadline", "got -1"),
        ({"deadline": INF}, "deadline", "got inf"),
        ({"deadline": 4.0, "grace": 5.0}, "deadline", "at least grace, which is 5 s, got 4 s"),
        ({"deadline": 4.0, "min_interval": 5.0}, "deadline", "at least min_interval, which is 5 s, got 4 s"),
        strict=True,
    ),
)
def test_rules_that_make_no_sense(values: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        RoundRules(**{"num_required": 2} | values)
    assert caught.value.field == f"rounds.{field}"


@together(
    "rules",
    [
        EVERYTHING,
        ADAPTIVE,
        ALIVE,
        RoundRules(2, min_required=2, deadline=1.0),
        RoundRules(2, grace=1.0, deadline=1.0),
        RoundRules(2, grace="adaptive", max_grace=1e9, deadline=1.0),  # the deadline is the limit
        RoundRules(2, expected="alive", grace="adaptive"),
        RoundRules(2**62, grace=315_576_000_000.0),
    ],
)
def test_records_of_rules(rules: RoundRules) -> None:
    assert rules_of(json.loads(json.dumps(rules_record(rules), allow_nan=False))) == rules


# Random histories

WORKERS = ("a", "b", "c", "d", "")
durations = st.integers(0, 160).map(lambda eighths: eighths / 8)


@st.composite
def random_rules(draw: st.DrawFn) -> RoundRules:
    num_required = draw(st.integers(1, 3))
    grace: float | Literal["adaptive"] = draw(st.sampled_from(["adaptive", "adaptive", 0.0, 0.5, 2.0, 5.0]))
    expected: int | Literal["alive"] | None = None
    if grace:
        expected = draw(st.sampled_from([None, "alive", "alive", num_required, num_required + 1]))
    min_interval = draw(st.sampled_from([0.0, 0.0, 1.0, 4.0]))
    deadline = draw(st.sampled_from([None, 5.0, 8.0]))
    min_required = None if deadline is None else draw(st.sampled_from([None, *range(1, num_required + 1)]))
    max_grace = draw(st.sampled_from([1.5, 60.0])) if grace == "adaptive" else 60.0
    return RoundRules(num_required, min_required, expected, grace, max_grace, min_interval, deadline)


class Histories(RuleBasedStateMachine):
    """A closer and the model hear of the same, and decide the same."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(TWO)
        self.now = 1000.0
        self.closer = Closer(TWO, self.now)
        self.alive = set(WORKERS)
        self.verdict: Verdict = Wait()

    def is_alive(self, worker: str) -> bool:
        return worker in self.alive

    @rule(rules=random_rules())
    def change(self, rules: RoundRules) -> None:
        self.closer.change(rules)
        if self.model.updates:
            self.model.later = rules
        else:
            self.model.rules = rules

    @rule(workers=st.lists(st.sampled_from(WORKERS), min_size=1, max_size=2))
    def push(self, workers: list[str]) -> None:
        self.model.updates += [(self.model.now, worker) for worker in workers]
        self.closer.admit(self.now, workers, len(self.model.updates))

    @rule(seconds=durations)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.model.now += seconds

    @rule()
    def time_passes_as_the_verdict_says(self) -> None:
        if isinstance(self.verdict, Wait) and self.verdict.until is not None:
            # Rounded up to eighths, on which sums of times are exact.
            self.time_passes(math.ceil((self.verdict.until - self.now) * 8) / 8)

    @precondition(lambda self: not self.model.updates)
    @rule(workers=st.lists(st.sampled_from(WORKERS), min_size=3, max_size=5), waits=st.lists(durations, max_size=2))
    def whole_round_passes(self, workers: list[str], waits: list[float]) -> None:
        for worker in workers:
            self.push([worker])
            self.they_agree()
            if waits:
                self.time_passes(waits.pop())
        for _ in range(3):
            self.they_agree()
            self.time_passes_as_the_verdict_says()
        self.they_agree()
        if isinstance(self.verdict, End):
            self.round_ends(0.125, 0.25)

    @rule(back=st.sampled_from([0.125, 3.0, 2.0**30]))
    def clock_is_set_back(self, back: float) -> None:
        self.now -= back

    @rule(worker=st.sampled_from(WORKERS))
    def client_leaves_or_returns(self, worker: str) -> None:
        self.alive ^= {worker}

    @precondition(lambda self: isinstance(self.verdict, End))
    @rule(seconds=durations, apply=durations)
    def round_ends(self, seconds: float, apply: float) -> None:
        self.time_passes(seconds)
        self.closer.end(self.now, apply)
        self.model.over(apply)

    @precondition(lambda self: isinstance(self.verdict, Overdue))
    @rule()
    def calls_fail(self) -> None:
        self.closer.fail_deadline(self.now)
        self.model.retries.append(self.model.now)

    @rule()
    def updates_are_dropped(self) -> None:
        self.closer.drop(self.now)
        self.model.over(None)

    @rule(begin=st.sampled_from([0.0, 12345.0]))
    def server_restarts(self, begin: float) -> None:
        record = json.loads(json.dumps(self.closer.record(self.now), allow_nan=False))
        self.now = begin
        self.closer = Closer.of(record, begin)
        assert self.closer.record(begin) == record

    @invariant()
    def they_agree(self) -> None:
        self.verdict = self.closer.verdict(self.now, self.is_alive)
        assert self.closer.verdict(self.now, self.is_alive) == self.verdict
        expected, left = self.model.verdict(self.is_alive)
        assert self.closer.grace == pytest.approx(self.model.grace())
        if isinstance(self.verdict, Overdue):
            assert expected == "overdue"
            missing = self.model.missing()
            assert self.verdict.missing == tuple(each for each in missing if each in self.alive)
            assert self.verdict.gone == tuple(each for each in missing if each not in self.alive)
        elif isinstance(self.verdict, End):
            assert self.model.updates, "a round without updates never ends"
            assert self.verdict.reason == expected
        else:
            assert expected == "wait"
            assert (self.verdict.until is None) == (left is None)
            if left is not None and self.verdict.until is not None:
                assert self.verdict.until > self.now
                assert self.verdict.until - self.now == pytest.approx(left, abs=1e-6)


test_random_histories = Histories.TestCase
test_random_histories.settings = settings(max_examples=80, stateful_step_count=30)
