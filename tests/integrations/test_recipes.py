"""The programs of howto/lightning.md, huggingface.md, keras.md and torchrun.md, in worker processes of the real loops.

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

from tests.project.blocks.reading import read_blocks
from tests.servers.polling import PATIENCE_SECONDS

RUN = (sys.executable, "-m", "gradserve_server", "run", "-n", "2", "train.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
DIES_ONCE = """
import os, signal
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_post_hook

def die_once(optimizer, *_):
    steps.append(optimizer)
    if len(steps) == 5 and os.environ["GRADSERVE_RANK"] == "1" and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)

steps = []
register_optimizer_step_post_hook(die_once)
"""


class Recipe(NamedTuple):
    """A program of a page.

    Attributes:
        page: The page.
        number: Its number among the programs of the page.
        needs: The packages that it imports.
        end: The step or version at which it ends, as it prints it.
        before: What runs before the program.
        variables: Environment variables.
    """

    page: str
    number: int
    needs: tuple[str, ...]
    end: str
    before: str = ""
    variables: tuple[tuple[str, str], ...] = ()


RECIPES = {
    "Lightning, a worker is killed": Recipe("lightning.md", 0, ("lightning", "torch"), "step 30", DIES_ONCE),
    "Trainer, a worker is killed": Recipe(
        "huggingface.md", 0, ("transformers", "accelerate", "torch"), "step 30", DIES_ONCE
    ),
    "Accelerate": Recipe("huggingface.md", 1, ("accelerate", "torch"), "step 30"),
    "Keras on JAX": Recipe("keras.md", 0, ("keras", "jax"), "version 8", "", (("KERAS_BACKEND", "jax"),)),
    "Keras on PyTorch": Recipe("keras.md", 0, ("keras", "torch"), "version 8", "", (("KERAS_BACKEND", "torch"),)),
}
RANKS = {
    "a machine is a worker": Recipe("torchrun.md", 0, ("torch",), "step 50"),
    "a rank is a worker": Recipe("torchrun.md", 1, ("torch",), "step 50"),
}


def written(recipe: Recipe, folder: Path, **more: str) -> dict[str, str]:
    """Writes train.py, as a reader does; returns the environment variables to run it with."""
    for package in recipe.needs:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: make install-frameworks")
    blocks = [block.text for block in read_blocks(f"docs/howto/{recipe.page}") if block.language == "python"]
    (folder / "train.py").write_text(recipe.before + blocks[recipe.number])
    own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "KERAS_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **own, **dict(recipe.variables), **more}


def check_equal_weights(recipe: Recipe, output: str, number: int) -> None:
    found = re.findall(rf"\b{recipe.end} weights (\S.*)$", output, re.MULTILINE)
    assert len(found) == number, output
    assert len(set(found)) == 1, output


@pytest.mark.timeout(4 * PATIENCE_SECONDS)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_workers_end_with_equal_weights(tmp_path: Path, recipe: Recipe) -> None:
    variables = written(recipe, tmp_path)
    done = subprocess.run(RUN, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check_equal_weights(recipe, done.stdout, 2)
    assert ("restart 1 of 3" in done.stderr) is bool(recipe.before), done.stderr


@pytest.mark.timeout(4 * PATIENCE_SECONDS)
@pytest.mark.parametrize("recipe", RANKS.values(), ids=RANKS)
def test_ranks_of_two_machines_end_with_equal_weights(tmp_path: Path, server_address: str, recipe: Recipe) -> None:
    variables = written(recipe, tmp_path, GRADSERVE_ADDRESS=server_address)
    machines = [
        subprocess.Popen(
            TORCHRUN, env=variables, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    outputs = [machine.communicate()[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    check_equal_weights(recipe, "".join(outputs), 4)
