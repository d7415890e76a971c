"""A simulation that finds nothing may be blind: it has to find each of these faults."""

import pytest

from tests.simulation.accumulators.faults import FAULTS as ACCUMULATORS
from tests.simulation.layers.faults import FAULTS as LAYERS
from tests.simulation.leases.faults import FAULTS as LEASES
from tests.simulation.planting import Fault
from tests.simulation.world import NUM_CASTS, FailedSeedError, World

WORLDS = 100
FIRST_WORLDS = {
    "window off by one": 7,
    "lose a pending event": 3,
    "publish a round before it is settled": 1,
    "gradients of the old round stay": 245,
    "events stay when the ledger is written": 3,
    "try a failed flush again": 8,
    "delete in memory only": 1,
    "carry out both copies of a call": 11,
    "let others into a closed queue": 100,
    "forget the readers of what is deleted": 236,
    "give memory back while it is read": 13,
    "count a forward again after its lease": 19,
    "draw another adjustment for a repeated forward": 2,
    "delete layers in memory only": 1,
    "a closed client keeps what it had": 1,
    "a sum takes over what others read": 350,
}
"""Where to begin with faults that take a coincidence, so that the test is short."""

CASES = [
    pytest.param(cast, name, plant, id=name)
    for cast, faults in enumerate((ACCUMULATORS, LAYERS, LEASES))
    for name, plant in faults.items()
]


def run_worlds(cast: int, first: int) -> None:
    """Runs worlds that have only the part with the fault."""
    for number in range(first, first + WORLDS):
        World(number * NUM_CASTS + cast).run()


@pytest.mark.parametrize(("cast", "name", "plant"), CASES)
def test_faults_are_found(cast: int, name: str, plant: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(FailedSeedError, match=r"seed \d+:\n"):
        run_worlds(cast, FIRST_WORLDS.get(name, 0))
