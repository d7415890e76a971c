"""A link whose transfers get equal parts of it."""

import math
import random

import pytest

from gradserve_server.commands.planning import SharedLink


def _ends(link: SharedLink[int], begins: list[float]) -> list[float]:
    """Returns when transfers end that begin at these times."""
    left, ends = sorted(begins), []
    while left or math.isfinite(link.next_end):
        if left and left[0] <= link.next_end:
            link.begin(left.pop(0), 0)
        else:
            ends.append(link.next_end)
            link.end(ends[-1])
    return ends


@pytest.mark.parametrize(
    ("begins", "ends"),
    [
        ([0], [1]),
        ([5], [6]),
        ([0, 0], [2, 2]),
        ([0, 2], [1, 3]),
        ([0, 0.5], [1.5, 2]),  # half of the first alone, then each gets half of the link
        ([0, 0, 0, 0], [4, 4, 4, 4]),
    ],
)
def test_transfers_of_a_second_each(begins: list[float], ends: list[float]) -> None:
    assert _ends(SharedLink(100, 100, math.inf), begins) == pytest.approx(ends)


@pytest.mark.parametrize(("number", "seconds"), [(1, 4), (4, 4), (8, 8)])
def test_no_transfer_is_faster_than_its_own_limit(number: int, seconds: float) -> None:
    assert _ends(SharedLink(100, 100, 25), [0] * number) == pytest.approx([seconds] * number)


def test_a_busy_link_carries_what_it_can() -> None:
    """Whatever the beginnings: without gaps, the last transfer ends when all bytes have been carried."""
    generator = random.Random(0)
    begins = [generator.uniform(0, 5) for _ in range(50)]
    begins[0] = 0
    assert _ends(SharedLink(100, 100, math.inf), begins)[-1] == pytest.approx(50, abs=1)
    assert _ends(SharedLink(100, 100, math.inf), begins) == sorted(_ends(SharedLink(100, 100, math.inf), begins))
