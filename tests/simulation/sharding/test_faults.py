"""A simulation that finds nothing may be blind: it has to find each of these faults."""

import pytest

from tests.simulation.planting import Fault
from tests.simulation.sharding.faults import FAULTS
from tests.simulation.sharding.world import FailedSeedError, World

WORLDS = 100
FIRST_WORLDS = {
    "reduce what is there": 26,
    "add in the order of arrival here": 22,
    "decide in the order of arrival": 12,
    "count a call twice": 1,
    "make parts of an earlier accumulator again": 799,
    "delete parts of a later accumulator": 31,
    "number by the clock alone": 76,
}
"""Where to begin with faults that take a coincidence, so that the test is short."""


def run_worlds(first: int) -> None:
    for seed in range(first, first + WORLDS):
        World(seed).run()


@pytest.mark.parametrize(("name", "plant"), FAULTS.items(), ids=FAULTS)
def test_faults_are_found(name: str, plant: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(FailedSeedError, match=r"seed \d+:\n"):
        run_worlds(FIRST_WORLDS.get(name, 0))
