"""A worker that trains a ResNet-18 with PyTorch's DistributedDataParallel over gloo."""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.driver import Setup, run_worker
from benchmarks.peers.pytorch.training import TrainingWorker


class DataParallelWorker(TrainingWorker):
    """One rank of the process group."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo",
            init_method=f"file://{setup.scratch / 'rendezvous'}",
            rank=setup.rank,
            world_size=setup.num_workers,
        )
        self.replica = DistributedDataParallel(self.model, gradient_as_bucket_view=True)


if __name__ == "__main__":
    run_worker(DataParallelWorker, packages=["torch"])
