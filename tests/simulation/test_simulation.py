"""What is promised of state directories holds in simulated worlds, whatever crashes when."""

import os
import subprocess
import sys
from collections import Counter

from tests.simulation.world import World

SEEDS = 15
"""As many as contain each fault."""
SAME = 9
"""The seed of a world that has everything."""

POINTS = ("write", "flush", "before the commit", "after the commit", "a failure of the disk", "the end of an epoch")
NETWORK = (
    "a request is lost",
    "an answer is lost",
    "a request is doubled",
    "a client is cut off",
    "a call is cancelled",
)


def test_promises_hold() -> None:
    faults: Counter[str] = Counter()
    parts: set[str] = set()
    for seed in range(SEEDS):
        world = World(seed)
        world.run()
        faults.update(fault for _, fault, _ in world.faults)
        parts.update(part for part, _, _ in world.faults)
    assert parts == {"accumulators", "layers", "leases", "parameters"}
    for point in POINTS:
        assert faults[f"the server is killed at: {point}"] + faults[f"power is lost at: {point}"], point
    assert faults.keys() >= {*NETWORK, "the disk is full", "the server is suspended", "a client dies"}


def test_a_seed_is_always_the_same_world() -> None:
    command = [sys.executable, "-m", "tests.simulation", "--first", str(SAME), "--seeds", "1", "--trace"]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    world = World(SAME)
    world.run()
    assert printed.splitlines()[: len(world.trace)] == world.trace
    assert "power is lost" in printed
