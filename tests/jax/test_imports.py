"""What `import gradserve.jax` brings along."""

import subprocess
import sys

from tests.servers.polling import PATIENCE_SECONDS

PROGRAM = """
import sys
import jax, optax, jax.experimental, gradserve
gradserve.connect
known = set(sys.modules)
import gradserve.jax
more = {name.partition(".")[0] for name in set(sys.modules) - known}
print(sorted(more - sys.stdlib_module_names), jax.__name__)
"""

WITHOUT = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "optax" else find_spec(name, package)
import gradserve.jax
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )


def test_it_imports_jax_and_optax_alone() -> None:
    done = run(PROGRAM)
    assert done.stdout == "['gradserve', 'gradserve_protocol'] jax\n", done.stdout + done.stderr


def test_it_says_what_to_install() -> None:
    assert (
        run(WITHOUT)
        .stderr.rstrip()
        .endswith(
            "ModuleNotFoundError: gradserve.jax needs Optax, which is not installed; in a checkout of gradserve: "
            "pip install '.[jax]'"
        )
    )
