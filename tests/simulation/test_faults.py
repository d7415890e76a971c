"""A simulation that finds nothing may be blind: it has to find each of these faults."""

import pytest

from tests.simulation.faults import FAULTS, Fault
from tests.simulation.world import FailedSeedError, World

SEEDS = 100


def run_worlds() -> None:
    for seed in range(SEEDS):
        World(seed).run()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_faults_are_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises(FailedSeedError, match=r"seed \d+:\n"):
        run_worlds()
