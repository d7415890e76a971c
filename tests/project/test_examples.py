"""The examples, run as a reader would run them."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.polling import PATIENCE_SECONDS

EXAMPLES = Path(__file__).parents[2] / "examples"
JAVASCRIPT = EXAMPLES / "javascript"


def run(*command: str | Path) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


DISTRIBUTIONS = {"gradserve": ".", "numpy": ".", "sklearn": "scikit-learn", "torch": "torch"}
"""What pip installs for an import; NumPy comes with the client."""


def imported(program: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(program):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


@pytest.mark.parametrize("example", [path.name for path in EXAMPLES.glob("*.py")])
def test_each_says_what_to_install(example: str) -> None:
    program = ast.parse((EXAMPLES / example).read_text())
    install = " ".join(["pip install", *sorted({DISTRIBUTIONS[name] for name in imported(program)})])
    start = f"python examples/{example} localhost:50051"
    assert f"\n    {install}\n    {start}\n" in (ast.get_docstring(program) or "")
    assert f" | `{install}` | `{start}` |\n" in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("attempt", ["first", "again"])
def test_numpy_training(server_address: str, attempt: str) -> None:
    output = run(sys.executable, EXAMPLES / "numpy_training.py", server_address)
    found = re.findall(r"^worker-\d: y = (\S+) \* x \+ (\S+)$", output, re.MULTILINE)
    assert len(found) == 4, attempt
    assert len(set(found)) == 1, "the workers ended with different weights"
    assert [float(number) for number in found[0]] == pytest.approx([3, -1], abs=0.05)


@pytest.mark.parametrize("attempt", ["first", "again"])
def test_lstm_digits(server_address: str, attempt: str) -> None:
    output = run(sys.executable, EXAMPLES / "lstm_digits.py", server_address, "--epochs", "4")
    accuracies = [float(found) for found in re.findall(r"^epoch \d: (\S+)% of the test digits", output, re.MULTILINE)]
    assert len(accuracies) == 4, attempt
    assert accuracies[-1] > 85


@pytest.mark.parametrize("algorithm", ["fedavg", "fedadam", "fedbuff"])
def test_federated_digits(server_address: str, algorithm: str) -> None:
    output = run(sys.executable, EXAMPLES / "federated_digits.py", server_address, "--algorithm", algorithm)
    *versions, last = output.splitlines()
    found = [
        re.match(r"step (\d+): (\S+)% of the test digits(, \d clients, whose loss was \S+)?", each) for each in versions
    ]
    steps = [int(each[1]) for each in found if each is not None]
    accuracies = [float(each[2]) for each in found if each is not None]
    assert (steps[0], steps[-1], len(steps)) == (0, 30, len(versions))
    assert accuracies[0] < 30
    assert max(accuracies[-5:]) > 75
    assert last.startswith("30 rounds of weight ")


@pytest.mark.parametrize("attempt", ["first", "again"])
def test_batch_norm_layer(server_address: str, attempt: str) -> None:
    output = run(sys.executable, EXAMPLES / "batch_norm_layer.py", server_address, "--epochs", "3")
    accuracies = [float(found) for found in re.findall(r"^epoch \d: (\S+)% of the test digits", output, re.MULTILINE)]
    assert len(accuracies) == 3, attempt
    assert accuracies[-1] > 90


@pytest.mark.parametrize("attempt", ["first", "again"])
@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
def test_javascript(server_address: str, attempt: str) -> None:
    assert (JAVASCRIPT / "node_modules").is_dir(), "run: npm install --prefix examples/javascript"
    output = run("node", JAVASCRIPT / "apply_and_take.js", server_address)
    lines = output.splitlines()
    assert len(lines) == 6, attempt
    assert lines[:4] == [
        "applied [1, 2, 3]: APPLY_OUTCOME_ACCEPTED, 1 in the round",
        "sent again: duplicate is true, nothing was counted twice",
        "applied [3, 6, 9]: APPLY_OUTCOME_ACCEPTED, 2 in the round",
        "sent again: duplicate is true, nothing was counted twice",
    ]
    assert lines[4].startswith("wrong shape: 3 INVALID_ARGUMENT: ")
    assert lines[5:] == ["average of 2 gradients: [2, 4, 6], now at step 1"]


@pytest.mark.parametrize("attempt", ["first", "again"])
@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
def test_javascript_over_the_bulk_socket(server_address: str, attempt: str) -> None:
    output = run("node", JAVASCRIPT / "bulk_round.js", server_address)
    assert output.splitlines() == [
        "applied 10 MB: APPLY_OUTCOME_ACCEPTED, 1 in the round",
        "applied 10 MB: APPLY_OUTCOME_ACCEPTED, 2 in the round",
        "average of 2 gradients: 2 ... 2",
        "wrong number: 3 INVALID_ARGUMENT: Argument num_required must be positive, but was 0",
    ], attempt
