from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.cases.ways import GRPC
from benchmarks.harness.contestants import Contestant
from benchmarks.harness.effort import Effort
from benchmarks.harness.environments import Environment
from benchmarks.harness.latency import LatencyMeasurement
from benchmarks.harness.report import render


class ThisEnvironment(Environment):
    def prepare(self, progress: Callable[[str], None]) -> Path:
        return Path(sys.executable)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, str]:
    return {"name": "busy", "journal": str(tmp_path / "journal")}


def test_percentiles_are_of_the_calls_of_all_repetitions(options: dict[str, str]) -> None:
    this = ThisEnvironment("this", ())
    busy = Contestant("busy", this, "tests.benchmarks.fake_peer", num_workers=2, options=options)
    bad = Contestant("bad", this, "tests.benchmarks.fake_peer", options={**options, "fault": "wrong result"})
    result = LatencyMeasurement("checks", (busy, bad), p99_limit=0.2).run(Effort(2), lambda text: None)
    outcome, failed = result.outcomes
    assert len(outcome.seconds) == 2 * 2 * 200
    assert outcome.median == pytest.approx(0.1005)
    assert outcome.p99 == pytest.approx(0.198)
    assert len(outcome.bytes_per_second) == 2
    assert failed.failure is not None
    assert failed.failure in render(result)
    assert [str(verdict).partition(":")[0] for verdict in result.verdicts()] == ["reached", "not measured"]
    assert [each["label"] for each in result.to_json()["outcomes"]] == ["busy", "bad"]


def test_health_is_checked_while_gradients_stream() -> None:
    contestant = GRPC.contestant("health", 3, num_bytes=4_000_000, seconds=0.2)
    result = LatencyMeasurement("checks", (contestant,), p99_limit=60.0).run(Effort(1), lambda text: None)
    (outcome,) = result.outcomes
    assert outcome.failure is None
    assert outcome.seconds
    assert outcome.bytes_per_second[0] > 0
