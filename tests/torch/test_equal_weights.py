"""Workers in processes of their own end with the weights of one process that trains on the joined batches."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.servers.polling import PATIENCE_SECONDS
from tests.torch.training_processes import NUM_STEPS, network, optimizer_of, train

TOLERANCE = 1e-5
"""After 100 steps of float32, whose sums are rounded in another order. Weights are of about 1."""


@pytest.fixture(scope="module")
def trained(server_address: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    program = [sys.executable, "-m", "tests.torch.training_processes", server_address, str(folder)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    model = network()
    train(model, optimizer_of(model), 0, 1)
    state: dict[str, torch.Tensor] = model.state_dict()
    before = network().state_dict()
    assert NUM_STEPS == 100
    assert all((state[name] - before[name]).abs().max() > 1000 * TOLERANCE for name in state), "nothing was learnt"
    return state


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("way", ["average_gradients", "comm_hook"])
def test_weights(trained: Path, expected: dict[str, torch.Tensor], way: str, num_workers: int) -> None:
    workers = [torch.load(trained / f"{way}-{num_workers}-{rank}.pt") for rank in range(num_workers)]
    for worker in workers:
        errors = {name: float((worker[name] - exact).abs().max()) for name, exact in expected.items()}
        assert max(errors.values()) <= TOLERANCE, errors
        assert all(torch.equal(worker[name], workers[0][name]) for name in expected), "not the same bits"
