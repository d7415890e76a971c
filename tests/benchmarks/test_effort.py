from __future__ import annotations

import math

import pytest

from benchmarks.harness.effort import Effort


@pytest.mark.parametrize(
    ("effort", "repetitions"),
    [
        (Effort(5), 5),
        (Effort(5, math.inf), 5),
        (Effort(5, 0), 3),
        (Effort(2, 0), 2),
    ],
)
def test_three_repetitions_are_made_however_long_they_take(effort: Effort, repetitions: int) -> None:
    assert list(effort.repetitions()) == list(range(repetitions))
