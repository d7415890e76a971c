"""A worker that trains a ResNet-18 in PyTorch, with gradients averaged by gradserve."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradserve.torch
from benchmarks.peers.driver import Setup, run_worker
from benchmarks.peers.gradserve.connection import Connection
from benchmarks.peers.pytorch.training import TrainingWorker


class AveragingWorker(TrainingWorker):
    """Averages when the optimizer steps, or with "hook" in the backward pass, in DistributedDataParallel."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        client = Connection.of(setup).client
        if not setup.options["hook"]:
            self._averaging = gradserve.torch.average_gradients(
                client, self.model, self.optimizer, num_required=setup.num_workers, name="resnet18"
            ).__enter__()
            return
        store = dist.FileStore(str(setup.scratch / f"rendezvous-{setup.rank}"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        replica = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        hook = gradserve.torch.comm_hook(client, replica, num_required=setup.num_workers, name="resnet18")
        replica.register_comm_hook(None, hook)
        self.replica = replica


if __name__ == "__main__":
    run_worker(AveragingWorker, packages=["gradserve", "grpcio", "protobuf", "numpy", "torch"])
