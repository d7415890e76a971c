from __future__ import annotations

import pytest

from benchmarks.harness.summary import Summary, paired_speed_ratios, speed_ratio


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], Summary(3.0, 3.0, 3.0)),
        ([1.0, 2.0], Summary(1.5, 1.25, 1.75)),
        ([5.0, 1.0, 2.0, 4.0, 3.0], Summary(3.0, 2.0, 4.0)),
    ],
)
def test_summary(values: list[float], expected: Summary) -> None:
    assert Summary.of(values) == expected


def test_half_the_time_is_twice_the_speed() -> None:
    assert speed_ratio([1.0, 1.0, 9.0], [2.0, 2.0, 2.0]) == 2.0


def test_paired_ratios_compare_repetition_with_repetition() -> None:
    assert paired_speed_ratios([1.0, 2.0, 4.0], [2.0, 4.0, 8.0]) == Summary(2.0, 2.0, 2.0)
