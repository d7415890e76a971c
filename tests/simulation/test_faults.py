"""A simulation that finds nothing may be blind: it has to find each of these faults."""

import pytest

from tests.simulation.faults import FAULTS
from tests.simulation.world import FailedSeedError, World

SEEDS = 100
FIRST_SEEDS = {
    "gradients of the old round stay": 15,
    "try a failed flush again": 28,
    "carry out both copies of a call": 40,
}
"""Where to begin with faults that take a rare coincidence, so that the test is short."""


def run_worlds(first: int) -> None:
    for seed in range(first, first + SEEDS):
        World(seed).run()


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    with pytest.raises(FailedSeedError, match=r"seed \d+:\n"):
        run_worlds(FIRST_SEEDS.get(name, 0))
