"""What is promised of state directories holds in simulated worlds, whatever crashes when."""

import os
import subprocess
import sys
from collections import Counter

from tests.simulation.world import World

SEEDS = 20


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
    for seed in range(SEEDS):
        world = World(seed)
        world.run()
        faults.update(fault for fault, _ in world.faults)
    for point in POINTS:
        assert faults[f"the server is killed at: {point}"] + faults[f"power is lost at: {point}"], point
    assert faults.keys() >= {*NETWORK, "the disk is full"}


def test_a_seed_is_always_the_same_world() -> None:
    command = [sys.executable, "-m", "tests.simulation", "--first", "5", "--seeds", "1", "--trace"]
    printed = [
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": salt}, capture_output=True, text=True, check=True
        ).stdout
        for salt in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert "power is lost" in printed[0]
