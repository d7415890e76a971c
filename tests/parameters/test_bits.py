"""Parameters have the same bits after thirty rounds, whatever computes them, and wherever a restart falls."""

import asyncio
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from gradserve_server.parameters.parameters import Parameters
from gradserve_server.storage.journal import Durability
from tests.parameters import bits
from tests.parameters.durable.disk import Disk
from tests.processors.test_processors import ONLY_ON_DEMAND, checks_all, has_v3, is_x86

PROCESSORS = {"generic": True, "x86-64-v2": True, "x86-64-v3": has_v3}
"""The processors that Numba compiles for, and whether this machine has all that they have."""
IN_EVERY_RUN = "generic"
RESTARTS = (1, 5, 6, 44, 45, 46, 89)
"""The numbers of updates after which the server is killed: within rounds, and between two."""


@cache
def expected() -> dict[str, str]:
    """Returns the digests as NumPy computes them in one thread."""
    found = bits.digests(1, is_compiled=False)
    assert len(set(found.values())) == len(bits.OPTIMIZERS)
    return found


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("num_threads", [2, 3])
def test_numpy_in_several_threads(num_threads: int) -> None:
    assert bits.digests(num_threads, is_compiled=False) == expected()


@pytest.mark.sampled(every=2)
@pytest.mark.usefixtures("_compiled_kernels")
@pytest.mark.parametrize("num_threads", [1, 2])
def test_compiled(num_threads: int) -> None:
    assert bits.digests(num_threads, is_compiled=True) == expected()


@pytest.mark.exhaustive  # each compiles the kernels once more
@pytest.mark.skipif(not is_x86, reason="needs an x86-64")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_compiled_for_other_processors(processor: str) -> None:
    """In a process of its own; compiling takes half a minute if it has never been done."""
    if processor != IN_EVERY_RUN and not checks_all:
        pytest.skip(ONLY_ON_DEMAND)
    if not PROCESSORS[processor]:
        pytest.skip(f"needs a processor with all of {processor}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.parameters.bits"],
        env={**os.environ, "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected()


@pytest.mark.sampled
@pytest.mark.parametrize("durability", [Durability.ROUND, Durability.GRADIENT])
@pytest.mark.parametrize("name", bits.OPTIMIZERS)
async def test_restarts(tmp_path: Path, name: str, durability: Durability) -> None:
    """At level round, the updates of the open round are gone: the server is killed between two rounds."""
    disk = await Disk.open(tmp_path / "state", durability)
    disks = [disk]

    async def restarted(parameters: Parameters, number: int) -> Parameters:
        is_between_rounds = number % bits.WORKERS == 0
        if number not in RESTARTS or (durability is Durability.ROUND and not is_between_rounds):
            return parameters
        disks.append(await disks[-1].after_crash())
        return disks[-1].found()

    try:
        found = await bits.run(disk.parameters, bits.OPTIMIZERS[name], restarted)
    finally:
        disk.close()
    assert len(disks) > 2
    assert found == (await asyncio.to_thread(expected))[name]  # it has an event loop of its own
