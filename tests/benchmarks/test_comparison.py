from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from benchmarks.harness.comparison import Comparison, ComparisonResult
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.effort import Effort
from benchmarks.harness.environments import Environment, NotAvailableError
from benchmarks.harness.report import render, render_verdicts
from benchmarks.harness.verdicts import Target


class ThisEnvironment(Environment):
    """The interpreter that runs the tests, whatever is installed in it."""

    def prepare(self, progress: Callable[[str], None]) -> Path:
        return Path(sys.executable)


class MissingEnvironment(Environment):
    def prepare(self, progress: Callable[[str], None]) -> Path:
        raise NotAvailableError("no such package")


THIS = ThisEnvironment("this", ())


@dataclass(frozen=True)
class Arena:
    journal: Path

    def contestant(self, name: str, *, environment: Environment = THIS, **options: str) -> Contestant:
        return Contestant(
            name,
            environment,
            worker="tests.benchmarks.fake_peer",
            options={"name": name, "journal": str(self.journal), **options},
        )

    def compare(
        self, *contestants: Contestant, repeats: int = 2, targets: tuple[Target, ...] = (), num_own: int = 1
    ) -> ComparisonResult:
        comparison = Comparison("a step", contestants, num_bytes=1000, steps=2, targets=targets, num_own=num_own)
        return comparison.run(Effort(repeats), lambda text: None)

    def steps(self) -> list[tuple[str, int]]:
        """Who did how many steps in a row."""
        lines = [line.split() for line in self.journal.read_text(encoding="utf-8").splitlines()]
        names = [name for name, command in lines if command == "step"]
        return [(name, len(list(run))) for name, run in groupby(names)]


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena(tmp_path / "journal")


def test_contestants_take_turns_there_and_back_again(arena: Arena) -> None:
    result = arena.compare(arena.contestant("a"), arena.contestant("b"), repeats=3)
    # Three steps to warm up, then one that is not counted and two that are.
    assert arena.steps() == [("a", 3), ("b", 3), ("a", 3), ("b", 6), ("a", 6), ("b", 3)]
    assert [len(outcome.seconds) for outcome in result.outcomes] == [3, 3]
    assert all(seconds >= 0.001 for outcome in result.outcomes for seconds in outcome.seconds)


def test_every_step_is_settled_and_results_are_checked_before_measuring(arena: Arena) -> None:
    arena.compare(arena.contestant("a"), repeats=1)
    commands = [line.split()[1] for line in arena.journal.read_text(encoding="utf-8").splitlines()]
    assert commands == 3 * ["step", "check", "settle"] + 3 * ["step", "settle"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [("wrong result", "wrong average"), ("end", "out of luck")],
)
def test_one_that_fails_is_reported_and_the_others_go_on(arena: Arena, fault: str, message: str) -> None:
    bad = arena.contestant("bad", fault=fault)
    result = arena.compare(arena.contestant("good"), bad)
    good, failed = result.outcomes
    assert len(good.seconds) == 2
    assert failed.failure is not None
    assert failed.failure.startswith("failed: ")
    assert message in failed.failure
    assert result.speed_beside(good, failed) is None
    assert failed.failure in render(result)
    assert result.to_json()["contestants"][1]["failure"] == failed.failure


def test_one_that_is_not_available_is_reported(arena: Arena) -> None:
    missing = arena.contestant("missing", environment=MissingEnvironment("missing", ()))
    target = Target("missing", ("missing",), 1.0)
    result = arena.compare(arena.contestant("good"), missing, targets=(target,))
    assert result.outcomes[1].failure == "not available: no such package"
    assert "not measured" in render_verdicts(result.verdicts())


def test_a_target_counts_the_fastest_that_stands_for_the_peer(arena: Arena) -> None:
    target = Target("peer", ("slow", "fast"), 0.8)
    contestants = [arena.contestant(name) for name in ("own", "slow", "fast", "other")]
    result = arena.compare(*contestants, repeats=1, targets=(target,))
    for outcome, seconds in zip(result.outcomes, [2.0, 3.0, 1.0, 0.1], strict=True):
        outcome.seconds[:] = [seconds]
    (verdict,) = result.verdicts()
    assert verdict.measured == 0.5
    assert str(verdict) == "MISSED: a step: own: 0.50x the speed of peer, target >= 0.80x"


def test_several_contestants_are_gradserves(arena: Arena) -> None:
    targets = (Target("peer", ("peer",), 2.0), Target("peer", ("peer",), 2.0, own="other way"))
    contestants = [arena.contestant(name) for name in ("one way", "other way", "peer")]
    result = arena.compare(*contestants, repeats=1, targets=targets, num_own=2)
    for outcome, seconds in zip(result.outcomes, [2.0, 1.0, 3.0], strict=True):
        outcome.seconds[:] = [seconds]
    assert [str(verdict).partition(":")[0] for verdict in result.verdicts()] == ["MISSED", "reached"]
    header, one, other, peer = render(result).splitlines()[1:]
    assert header.split("  ")[-1].strip() == "B's speed"
    assert [line.split()[0] for line in (one, other, peer)] == ["A", "B", "peer"]
    assert peer.endswith("1.50x (1.50-1.50)  3.00x (3.00-3.00)")
    assert one.endswith("2.00x (2.00-2.00)")
    json = result.to_json()
    assert [list(each["gradserve_speeds"]) for each in json["contestants"]] == [
        ["other way"],
        ["one way"],
        ["one way", "other way"],
    ]
    assert [target["fraction_of_target"] for target in json["targets"]] == [0.75, 1.5]


def test_json_has_versions_and_ratios(arena: Arena) -> None:
    result = arena.compare(arena.contestant("own"), arena.contestant("peer")).to_json()
    own, peer = result["contestants"]
    assert set(own["versions"]) == {"numpy"}
    assert len(peer["repetitions"]) == 2
    assert peer["gradserve_speeds"]["own"]["ratio"] > 0
    assert own["gradserve_speeds"] == {}
