"""A simulation that finds nothing may be blind: it has to find each of these faults."""

import pytest

from tests.simulation.planting import Fault
from tests.simulation.sharding.faults import FAULTS, PARAMETERS_FAULTS
from tests.simulation.sharding.parameters import ParametersWorld
from tests.simulation.sharding.world import FailedSeedError, World

WORLDS = 100
FIRST_WORLDS = {
    "reduce what is there": 37,
    "add in the order of arrival here": 22,
    "decide in the order of arrival": 17,
    "count a call twice": 21,
    "make parts of an earlier accumulator again": 831,
    "delete parts of a later accumulator": 43,
    "number by the clock alone": 76,
    "forget by steps of an earlier epoch": 9,
    "stay in the epoch when the step is set": 161,
    "count gradients of an earlier epoch": 1,
    "keep what stays when another average comes": 9,
    "keep nothing for readers": 9,
    "hold gradients of clients that have ended": 189,
    "withdraw nothing": 1,
    "forget what counts": 9,
}
"""Where to begin with faults that take a coincidence, so that the test is short."""

FIRST_PARAMETERS_WORLDS = {
    "count norms of other servers twice": 1,
    "measure to the first alone": 1,
    "tell nobody what counts": 2,
    "forget measurements on disk": 1,
}


def run_worlds(first: int, kind: type[World] = World) -> None:
    for seed in range(first, first + WORLDS):
        kind(seed).run()


@pytest.mark.parametrize(("name", "plant"), FAULTS.items(), ids=FAULTS)
def test_faults_are_found(name: str, plant: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(FailedSeedError, match=r"seed \d+:\n"):
        run_worlds(FIRST_WORLDS.get(name, 0))


@pytest.mark.parametrize(("name", "plant"), PARAMETERS_FAULTS.items(), ids=PARAMETERS_FAULTS)
def test_faults_of_parameters_are_found(name: str, plant: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(FailedSeedError, match=r"seed \d+:\n"):
        run_worlds(FIRST_PARAMETERS_WORLDS.get(name, 0), ParametersWorld)
