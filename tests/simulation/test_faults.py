"""A simulation that finds nothing may be blind: it has to find each of these faults."""

import pytest

from tests.simulation.accumulators.faults import FAULTS as ACCUMULATORS
from tests.simulation.layers.faults import FAULTS as LAYERS
from tests.simulation.leases.faults import FAULTS as LEASES
from tests.simulation.parameters.faults import FAULTS as PARAMETERS
from tests.simulation.planting import Fault
from tests.simulation.world import NUM_CASTS, FailedSeedError, World

WORLDS = 100
FOUND = r"(?s)seed \d+:\n.*\n(BrokenPromiseError|DamagedError|UnavailableError): "
"""The errors that show a fault. Any other is an error of the simulation."""
FIRST_WORLDS = {
    "window off by one": 28,
    "lose a pending event": 3,
    "publish a round before it is settled": 1,
    "gradients of the old round stay": 46,
    "events stay when the ledger is written": 5,
    "try a failed flush again": 15,
    "carry out both copies of a call": 2,
    "believe that an old call is new": 3,
    "let others into a closed queue": 84,
    "close a queue without a word": 13,
    "forget the readers of what is deleted": 63,
    "count what its caller has given up": 3,
    "give memory back while it is read": 3,
    "forget which forwards have counted": 5,
    "remember one forward too few": 18,
    "count a forward again after its lease": 6,
    "repeat a forward without renewing its lease": 2,
    "a sum takes over what others read": 211,
    "carry out both copies of a push": 7,
    "updates of the old round stay": 45,
    "round masters at a crash": 8,
    "forget the call of a change": 21,
    "refuse what was accepted and lost": 9,
    "accept what is too stale": 5,
    "begin the grace again with each update": 130,
    "forget the deadline at a crash": 2,
    "add in the order of arrival": 26,
    "forget the newest hash": 5,
    "leave records that a crash has left": 108,
    "fork without the state": 10,
    "count memory for readers that have left": 297,
}
"""Where to begin with faults that take a coincidence, so that the test is short."""

CASES = [
    pytest.param(cast, name, plant, id=name)
    for cast, faults in enumerate((ACCUMULATORS, LAYERS, LEASES, PARAMETERS))
    for name, plant in faults.items()
]


def run_worlds(cast: int, first: int) -> None:
    """Runs worlds that have only the part with the fault."""
    for number in range(first, first + WORLDS):
        World(number * NUM_CASTS + cast).run()


@pytest.mark.parametrize(("cast", "name", "plant"), CASES)
def test_faults_are_found(cast: int, name: str, plant: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(FailedSeedError, match=FOUND):
        run_worlds(cast, FIRST_WORLDS.get(name, 0))
