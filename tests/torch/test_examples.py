"""The examples with PyTorch, run as a reader would run them."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.servers.polling import PATIENCE_SECONDS

EXAMPLES = Path(__file__).parents[2] / "examples"
SURVIVOR = re.compile(
    r"^worker (\d): step (\d+) after (\d+) batches, weights (\w+), (\S+)% of the test digits$", re.MULTILINE
)


def run(*arguments: str, example: str = "pytorch_digits.py") -> str:
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_survivors(output: str, number: int) -> list[int]:
    """Checks that all have finished with equal weights, which have learnt; returns how many batches each computed."""
    found = SURVIVOR.findall(output)
    assert [int(rank) for rank, *_ in found] == list(range(number)), output
    assert {int(step) for _, step, *_ in found} == {150}
    assert len({weights for *_, weights, _ in found}) == 1, output
    assert all(float(accuracy) > 85 for *_, accuracy in found), output
    return [int(batches) for _, _, batches, *_ in found]


def test_one_of_four_is_killed(server_address: str) -> None:
    output = run(server_address)
    killed = re.search(r"^worker 3: killed at step (\d+)$", output, re.MULTILINE)
    assert killed is not None, output
    assert int(killed[1]) >= 50
    check_survivors(output, 3)


def test_one_of_four_is_slow(server_address: str) -> None:
    batches = check_survivors(run(server_address, "--slow"), 4)
    assert batches[3] < 150, "nobody was faster"


def test_diloco_with_one_that_is_slow_and_one_that_is_killed(server_address: str) -> None:
    output = run(server_address, example="diloco_digits.py")
    found = re.findall(r"^worker (\d): version 12, weights (\w+), (\S+)% of the test digits$", output, re.MULTILINE)
    assert [int(rank) for rank, *_ in found] == list(range(4)), output
    assert len({weights for _, weights, _ in found}) == 1, output
    assert all(float(accuracy) > 80 for *_, accuracy in found), output
    joined = re.search(
        r"^worker 3: killed at version (\d+)\nworker 3: .* joined at version (\d+)$", output, re.MULTILINE
    )
    assert joined is not None, output
    assert 4 <= int(joined[1]) <= int(joined[2]) <= 12


def test_diloco_of_a_language_model(server_address: str, tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    options = ["--warm-up", "20", "--steps", "100", "--json", str(file)]
    output = run(server_address, *options, example="diloco_characters.py")
    losses = json.loads(file.read_text())["losses"]
    assert losses["DiLoCo, the mean"] < losses["begin"] - 0.3, output
