"""Workers of several ranks: one rank talks to the server, and all have what came of it."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gradserve
from gradserve import optim
from gradserve.torch import parameters_of
from tests.servers.polling import PATIENCE_SECONDS
from tests.torch.ranks_of_workers import (
    BATCH,
    RANKS,
    SYNC_EVERY,
    WORKERS,
    diloco_of,
    network,
    sgd,
    train,
    without_statistics,
)
from tests.torch.training_threads import together


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["fsdp", "ddp", "mesh of two dimensions"])
def test_a_worker_of_several_ranks_is_one_worker(
    server_address: str, clients: list[gradserve.Client], name: str, tmp_path: Path, way: str
) -> None:
    def alone(worker: int) -> dict[str, Any]:
        model = without_statistics(network())
        inner = sgd(model)
        with diloco_of(clients[worker], model, inner, name) as diloco:
            train(model, inner, worker, slice(BATCH * RANKS), diloco)
            diloco.sync()
        state: dict[str, Any] = model.state_dict()
        return state

    expected = together(*(partial(alone, worker) for worker in range(WORKERS)))
    of_ranks = f"{name}-ranks"
    clients[0].parameters(  # whose values count, rather than those of the worker that comes first
        parameters_of(network()),
        shared_name=of_ranks,
        optimizer=optim.SGD(0.7, momentum=0.5),
        num_required=WORKERS,
        agreement={"sync_every": str(SYNC_EVERY)},
    )
    program = [sys.executable, "-m", "tests.torch.ranks_of_workers", server_address, str(tmp_path), way, of_ranks]
    subprocess.run(program, timeout=PATIENCE_SECONDS, check=True)
    saved = [torch.load(tmp_path / f"{worker}-{rank}.pt") for worker in range(WORKERS) for rank in range(RANKS)]
    for each in saved:
        assert each["status"] == [SYNC_EVERY * 3, 3, 0]
        for key, value in expected[0].items():
            torch.testing.assert_close(each["state"][key], value, rtol=1e-5, atol=1e-6)
            assert torch.equal(each["state"][key], saved[0]["state"][key])
    version = clients[0].parameters(shared_name=of_ranks).read()
    assert (version.num_updates, version.total_weight) == (WORKERS, WORKERS * BATCH * RANKS * 2)
