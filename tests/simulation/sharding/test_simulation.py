"""What is promised of sharded accumulators holds in simulated worlds, whatever fails when."""

import os
import subprocess
import sys
from collections import Counter

from tests.simulation.sharding.parameters import ParametersWorld
from tests.simulation.sharding.world import World

SEEDS = 20
"""As many as contain each fault."""
SAME = 15
"""The seed of a world in which much happens."""

PARAMETERS_SEEDS = (23, 55, 121)
"""Seeds whose worlds have a mean with limited norms, Krum, and rounds that are faster than readers."""

FAULTS = (
    "a call is cancelled",
    "a client dies",
    "a client is cut off from a server",
    "a request is doubled",
    "a request is lost",
    "a server is killed at any time",
    "a server is killed with all others",
    "a server is not there",
    "an answer is lost",
    "an old decision is repeated",
)


def test_promises_hold() -> None:
    faults: Counter[str] = Counter()
    num_averages = 0
    for seed in range(SEEDS):
        world = World(seed)
        world.run()
        faults.update(world.faults)
        num_averages += world.truth.num_averages
    assert faults.keys() >= set(FAULTS)
    assert num_averages > 20 * SEEDS, "most of them are of the rounds at the end"


def test_promises_about_parameters_hold() -> None:
    faults: Counter[str] = Counter()
    for seed in PARAMETERS_SEEDS:
        world = ParametersWorld(seed)
        world.run()
        assert world.truth.num_averages > 5
        faults.update(world.faults)
    assert faults.keys() >= {"a server is killed at any time", "a client dies", "an answer is lost"}


def test_a_seed_is_always_the_same_world() -> None:
    command = [sys.executable, "-m", "tests.simulation.sharding", "--first", str(SAME), "--seeds", "1", "--trace"]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    world = World(SAME)
    world.run()
    assert printed.splitlines()[: len(world.trace)] == world.trace
    assert "is killed" in printed
