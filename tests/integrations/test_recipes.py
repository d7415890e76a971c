"""The programs of howto/lightning.md, huggingface.md, keras.md and torchrun.md end with equal weights on all workers.

`make install-frameworks` installs what they need; without it they are skipped.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from gradserve.testing import ServerThread
from tests.project.blocks.reading import read_blocks
from tests.servers.polling import PATIENCE_SECONDS

WORKERS = (sys.executable, "-m", "tests.integrations.workers")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")


class Recipe(NamedTuple):
    """A program of a page.

    Attributes:
        page: The page.
        number: Its number among the programs of the page.
        needs: The packages that it imports.
        end: The step or version at which it ends, as it prints it.
        kills: Whether a worker is killed, and started again.
        backend: The backend of Keras.
    """

    page: str
    number: int
    needs: tuple[str, ...]
    end: str
    kills: bool = False
    backend: str = ""


RECIPES = {
    "Lightning, a worker is killed": Recipe("lightning.md", 0, ("lightning", "torch"), "step 30", kills=True),
    "Trainer, a worker is killed": Recipe(
        "huggingface.md", 0, ("transformers", "accelerate", "torch"), "step 30", kills=True
    ),
    "Accelerate": Recipe("huggingface.md", 1, ("accelerate", "torch"), "step 30"),
    "Keras on JAX": Recipe("keras.md", 0, ("keras", "jax"), "version 8", backend="jax"),
    "Keras on PyTorch": Recipe("keras.md", 0, ("keras", "torch"), "version 8", backend="torch"),
}
MACHINES = Recipe("torchrun.md", 0, ("torch",), "step 50")


def written(recipe: Recipe, folder: Path, address: str) -> dict[str, str]:
    """Writes train.py, as a reader does; returns the environment variables to run it with."""
    for package in recipe.needs:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make install-frameworks")
    blocks = [block.text for block in read_blocks(f"docs/howto/{recipe.page}") if block.language == "python"]
    (folder / "train.py").write_text(blocks[recipe.number])
    return {
        **os.environ,
        "GRADSERVE_ADDRESS": address,
        "HF_HUB_OFFLINE": "1",
        "KERAS_BACKEND": recipe.backend,
        "KERAS_HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def check_equal_weights(recipe: Recipe, output: str, number: int) -> None:
    found = re.findall(rf"\b{recipe.end} weights (\S.*)$", output, re.MULTILINE)
    assert len(found) == number, output
    assert len(set(found)) == 1, output


@pytest.mark.timeout(4 * PATIENCE_SECONDS)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_workers_end_with_equal_weights(tmp_path: Path, recipe: Recipe) -> None:
    command = [*WORKERS, *recipe.needs, *(["--kill"] if recipe.kills else [])]
    with ServerThread() as server:
        variables = written(recipe, tmp_path, server.address)
        done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    check_equal_weights(recipe, done.stdout, 2)
    assert ("worker 1 was killed" in done.stderr) is recipe.kills


@pytest.mark.timeout(4 * PATIENCE_SECONDS)
def test_ranks_of_two_machines_end_with_equal_weights(tmp_path: Path) -> None:
    with ServerThread() as server:
        variables = written(MACHINES, tmp_path, server.address)
        machines = [
            subprocess.Popen(
                TORCHRUN, env=variables, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for _ in range(2)
        ]
        outputs = [machine.communicate()[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    check_equal_weights(MACHINES, "".join(outputs), 4)
