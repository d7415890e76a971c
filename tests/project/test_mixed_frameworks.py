"""The example in which PyTorch, JAX and NumPy train one model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.polling import PATIENCE_SECONDS

EXAMPLE = Path(__file__).parents[2] / "examples" / "mixed_frameworks" / "run.py"


def test_workers_end_with_equal_weights_and_the_loss_of_one_process(server_address: str) -> None:
    for library in ("torch", "jax", "optax"):
        pytest.importorskip(library, reason="not installed: make install-frameworks")
    done = subprocess.run(
        [sys.executable, EXAMPLE, server_address],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_SECONDS,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # threads that spin take the processor from other tests
    )
    assert done.returncode == 0, done.stderr
    differences = dict(
        re.findall(r"^(\w+)_worker.py: differs from the first worker by (\S+)$", done.stdout, re.MULTILINE)
    )
    assert set(differences) == {"pytorch", "jax", "numpy"}
    # The same averages, but each library may round a product and a sum together or apart: half a unit in the last place
    # of a weight below 1, in each of 40 steps.
    assert max(map(float, differences.values())) <= 40 * 2**-24
    (losses,) = re.findall(
        r"^loss on all digits: (\S+) at the start, (\S+) together, (\S+) in one", done.stdout, re.MULTILINE
    )
    start, together, alone = map(float, losses)
    assert together == pytest.approx(alone, abs=2e-4), "printed with four digits"
    assert together < 0.5 * start
