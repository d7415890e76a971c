"""What `import gradserve.torch` brings along."""

import subprocess
import sys

from tests.servers.polling import PATIENCE_SECONDS

_PROGRAM = """
import sys
import torch
before = set(sys.modules)
import gradserve
gradserve.connect
client = set(sys.modules) - before
import gradserve.torch
more = {name.partition(".")[0] for name in set(sys.modules) - before - client}
print(sorted(more - sys.stdlib_module_names))
"""

_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find_spec(name, package)
import gradserve.torch
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )


def test_it_imports_pytorch_alone() -> None:
    done = run(_PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['gradserve', 'gradserve_protocol']\n"


def test_the_client_does_not_import_it() -> None:
    done = run("import gradserve, sys; print('torch' in sys.modules, 'gradserve.torch' in sys.modules)")
    assert done.stdout == "False False\n", done.stderr


def test_it_says_what_to_install() -> None:
    done = run(_WITHOUT_TORCH)
    assert done.stderr.rstrip().endswith(
        "ModuleNotFoundError: gradserve.torch needs PyTorch, which is not installed; in a checkout of gradserve: "
        "pip install '.[torch]'"
    )


def test_its_name_shadows_nothing() -> None:
    done = run("import gradserve.torch, torch.nn; print(torch.__name__, gradserve.torch.__name__, torch.nn.__name__)")
    assert done.stdout == "torch gradserve.torch torch.nn\n", done.stderr
