"""Trains a model by DiLoCo in workers of two ranks each; run as a program: ADDRESS FOLDER WAY NAME.

All ranks are forked from one process that has imported PyTorch, so that it is read from disk once.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradserve
from gradserve import optim
from gradserve.torch import DiLoCo
from tests.servers.polling import PATIENCE_SECONDS
from tests.torch.seeds import seeded

WORKERS, RANKS = 2, 2
SYNC_EVERY = 3
STEPS = 8
BATCH = 8


def network(seed: int = 1) -> torch.nn.Module:
    with seeded(seed):
        return torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
        )


def batch_of(worker: int, step: int) -> torch.Tensor:
    """The batch of a worker, of which each rank has its share."""
    return torch.randn(BATCH * RANKS, 5, generator=torch.Generator().manual_seed(1000 * worker + step))


def train(model: torch.nn.Module, inner: Any, worker: int, share: slice, diloco: DiLoCo) -> None:
    for step in range(STEPS):
        inputs = batch_of(worker, step)[share]
        inner.zero_grad()
        (model(inputs) - inputs[:, :3]).square().mean().backward()
        diloco.count(tokens=len(inputs))
        inner.step()


def diloco_of(client: Any, model: torch.nn.Module, inner: Any, name: str, **options: Any) -> DiLoCo:
    return DiLoCo(
        client,
        model,
        inner,
        sync_every=SYNC_EVERY,
        outer_optimizer=optim.SGD(0.7, momentum=0.5),
        name=name,
        num_required=WORKERS,
        weight="tokens",
        **options,
    )


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def without_statistics(model: torch.nn.Module) -> torch.nn.Module:
    """Lets a batch normalization use its running statistics, which do not depend on how a batch is shared."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            module.eval()
    return model


def work(address: str, folder: Path, way: str, name: str, worker: int, rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{worker}"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model = without_statistics(network(1 if worker == 0 else 100 + worker))
    trained: torch.nn.Module = model
    options: dict[str, Any] = {}
    if way == "ddp":
        trained = DistributedDataParallel(model)
    elif way == "fsdp":
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("replicas", "shards"))
        fully_shard(model, mesh=mesh)
        options["process_group"] = dist.group.WORLD
    inner = sgd(trained)
    with gradserve.connect(address, timeout=PATIENCE_SECONDS) as client:
        share = slice(BATCH * rank, BATCH * (rank + 1))
        with diloco_of(client if rank == 0 else None, trained, inner, name, **options) as diloco:
            train(trained, inner, worker, share, diloco)
            diloco.sync()
            found = [diloco.step, diloco.version, diloco.num_failed]
    state = {
        key: each.full_tensor() if hasattr(each, "full_tensor") else each for key, each in model.state_dict().items()
    }
    torch.save({"state": state, "status": found}, folder / f"{worker}-{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    address, folder, way, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    processes = []
    for worker in range(WORKERS):
        for rank in range(RANKS):
            process = os.fork()
            if process == 0:
                work(address, folder, way, name, worker, rank)
                os._exit(0)
            processes.append(process)
    if any(os.waitpid(process, 0)[1] for process in processes):
        sys.exit("a rank failed")


if __name__ == "__main__":
    main()
