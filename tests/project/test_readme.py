"""The README's Python runs as printed."""

import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.servers.polling import PATIENCE_SECONDS

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)

MODEL_PRELUDE = """
import numpy as np
import gradserve
from concurrent.futures import ThreadPoolExecutor
client = gradserve.connect("localhost:50051")
def work(target):
    w, b = np.zeros(2), np.zeros(1)
"""
MODEL_EPILOGUE = """
    return w
with ThreadPoolExecutor(4) as threads:
    print(*threads.map(work, range(4)))
"""


def indented(block: str) -> str:
    return "".join(f"    {line}\n" for line in block.splitlines())


def run(program: str, address: str) -> str:
    """Runs a program against a server at another address than the usual one."""
    program = program.replace("localhost:50051", address)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("attempt", ["first", "again"])
def test_example(server_address: str, attempt: str) -> None:
    printed = run(BLOCKS[0], server_address)
    assert printed.count("ACCEPTED") == 4, attempt
    assert "[1.5 1.  3. ]" in printed


OPS_PRELUDE = """
import numpy as np
import gradserve
client = gradserve.connect("localhost:50051")
x, dy, gamma, beta = np.ones((2, 3, 3, 2)), np.ones((2, 3, 3, 2)), np.ones(2), np.zeros(2)
"""


def test_ops_example(server_address: str) -> None:
    assert run(OPS_PRELUDE + BLOCKS[3], server_address) == "(2, 3, 3, 2) [0. 0.] [18. 18.]\n"


@pytest.mark.parametrize("attempt", ["first", "again"])
def test_model_example(server_address: str, attempt: str) -> None:
    printed = run(MODEL_PRELUDE + indented(BLOCKS[1]) + MODEL_EPILOGUE, server_address)
    assert printed.split("[")[1:] == ["0.4065 0.4065] "] * 3 + ["0.4065 0.4065]\n"], attempt


def test_memory_that_the_server_reads(server_address: str) -> None:
    check = "\n    assert not average['w'].flags.writeable\n"
    program = MODEL_PRELUDE + indented(BLOCKS[1]) + indented(BLOCKS[2]) + check + MODEL_EPILOGUE
    assert run(program.replace('shared_name="net"', 'shared_name="net in place"'), server_address)


TORCH_PRELUDE = """
import gradserve.torch
import torch
client = gradserve.connect("localhost:50051")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(model, optimizer):
    model(torch.ones(1, 2)).sum().backward()
    before = model.bias.item()
    optimizer.step()
    print(round(before - model.bias.item(), 6))
"""
JAX_PRELUDE = """
import gradserve.jax
import jax.numpy as jnp
import optax
client = gradserve.connect("localhost:50051")
params = {"w": jnp.zeros(2)}
"""
JAX_EPILOGUE = """
updates, opt_state = optimizer.update({"w": jnp.ones(2)}, opt_state, params)
print(averaging.step)
averaging.close()
"""


@pytest.mark.parametrize(
    ("framework", "block", "prelude", "epilogue", "printed"),
    [("torch", 5, TORCH_PRELUDE, "", "0.1\n"), ("jax", 6, JAX_PRELUDE, JAX_EPILOGUE, "1\n")],
    ids=["torch", "jax"],
)
def test_training_scripts(
    server_address: str, framework: str, block: int, prelude: str, epilogue: str, printed: str
) -> None:
    pytest.importorskip(framework, reason="not installed: make install-frameworks")
    program = BLOCKS[block].replace("num_required=4", "num_required=1").replace('"net"', f'"{uuid.uuid4().hex}"')
    assert run(prelude + program + epilogue, server_address) == printed
