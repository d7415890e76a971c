from __future__ import annotations

import pytest

from benchmarks.harness.verdicts import LimitVerdict, SpeedVerdict, Verdict


@pytest.mark.parametrize(
    ("verdict", "text", "fraction"),
    [
        (
            SpeedVerdict("round", "gRPC", "TensorFlow", 2.0, 3.0),
            "reached: round: gRPC: 3.00x the speed of TensorFlow, target >= 2.00x",
            1.5,
        ),
        (
            SpeedVerdict("round", "gRPC", "TensorFlow", 2.0, None),
            "not measured: round: gRPC, TensorFlow: target >= 2.00x",
            None,
        ),
        (LimitVerdict("health", "gRPC", "ms", 50, 20), "reached: health: gRPC: 20 ms, target <= 50 ms", 2.5),
        (LimitVerdict("health", "gRPC", "ms", 50, 80), "MISSED: health: gRPC: 80 ms, target <= 50 ms", 0.625),
        (LimitVerdict("health", "gRPC", "ms", 50, None), "not measured: health: gRPC: target <= 50 ms", None),
    ],
)
def test_a_verdict(verdict: Verdict, text: str, fraction: float | None) -> None:
    assert str(verdict) == text
    assert verdict.to_json()["fraction_of_target"] == fraction
