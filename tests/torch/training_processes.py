"""Trains a model in worker processes, each on its part of every batch; run as a program.

Workers are forked from one process that has imported PyTorch, so that it is read from disk once.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import gradserve
import gradserve.torch
from gradserve.torch import backward_pass
from tests.servers.polling import PATIENCE_SECONDS
from tests.torch.process_group import alone

NUM_STEPS = 100
BATCH = 16
NUM_INPUTS, NUM_OUTPUTS = 6, 3


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(NUM_INPUTS, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.LayerNorm(16),
        torch.nn.Linear(16, NUM_OUTPUTS),
    )  # fmt: skip


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, NUM_INPUTS, generator=generator)
    return x, torch.sin(x[:, :NUM_OUTPUTS])


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, num_workers: int) -> None:
    """Takes all steps with every worker's share of the batches: equal shares, so the mean of means is the mean."""
    for step in range(NUM_STEPS):
        x, y = (part.chunk(num_workers)[rank] for part in batch_of(step))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def work(address: str, file: Path, rank: int, num_workers: int, way: str, begun: Callable[[], object]) -> None:
    """Trains as one worker and saves the weights; calls `begun` when it has its initial weights."""
    torch.set_num_threads(1)
    model, name = network(), f"{file.parent.name}-{way}-{num_workers}"
    if rank:
        torch.nn.init.zeros_(model[0].weight)  # the weights of the first worker take its place
    with gradserve.connect(address, timeout=PATIENCE_SECONDS) as client, tempfile.TemporaryDirectory() as folder:
        if way == "average_gradients":
            optimizer = optimizer_of(model)
            with gradserve.torch.average_gradients(client, model, optimizer, num_required=num_workers, name=name):
                begun()
                train(model, optimizer, rank, num_workers)
        else:
            gradserve.torch.broadcast_parameters(client, model, name=name)
            begun()
            backward_pass._LEAST_BYTES = 256  # several groups, as a large model has
            with alone(Path(folder)):
                # MiB in a bucket, different for each worker: from one parameter in each bucket to all in one.
                replica = DistributedDataParallel(model, bucket_cap_mb=[0.00001, 25, 0.001, 0.002][rank])
                hook = gradserve.torch.comm_hook(client, replica, num_required=num_workers, name=name)
                replica.register_comm_hook(None, hook)
                train(replica, optimizer_of(model), rank, num_workers)
    torch.save(model.state_dict(), file)


def run(address: str, folder: Path, num_workers: int, way: str) -> None:
    """Runs the workers, in processes; the weights of each are in FOLDER/WAY-WORKERS-RANK.pt."""
    has_begun, begins = os.pipe()
    processes = []
    for rank in range(num_workers):
        process = os.fork()
        if process == 0:
            if rank:
                os.read(has_begun, 1)
            file = folder / f"{way}-{num_workers}-{rank}.pt"
            work(address, file, rank, num_workers, way, lambda: os.write(begins, bytes(num_workers)))
            os._exit(0)
        processes.append(process)
    statuses = [os.waitpid(process, 0)[1] for process in processes]
    if any(statuses):
        sys.exit(f"a worker failed: {way}, {num_workers} workers")


def warm_up() -> None:
    """Lets PyTorch import what a first step needs, so that not every worker does; without the threads of autograd."""
    torch.set_num_threads(1)
    model = network()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer_of(model).step()


if __name__ == "__main__":
    warm_up()
    for number in (1, 2, 4):
        for how in ("average_gradients", "comm_hook"):
            run(sys.argv[1], Path(sys.argv[2]), number, how)
