"""A worker that averages gradients by all-reduce, with the gradients left in place.

They are a ResNet-50's 161 tensors, or one tensor if `num_bytes` is given. Without `bucket_bytes` the tensors are
reduced one by one. With it they are views into buckets of that size, laid out as by PyTorch's DistributedDataParallel,
and all buckets are reduced at once.
"""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.workloads.resnet50 import parameter_shapes


class AllReduceWorker(Worker):
    """One rank of the process group."""

    def __init__(self, setup: Setup) -> None:
        self._gradient = float(setup.rank + 1)
        self._expected = (setup.num_workers + 1) / 2
        self._num_workers = setup.num_workers
        bucket_bytes = setup.options["bucket_bytes"]
        self._together = bucket_bytes is not None
        lengths = [math.prod(shape) for shape in parameter_shapes().values()]
        if "num_bytes" in setup.options:
            lengths = [setup.num_floats]
        self._tensors = [torch.empty(length) for length in _buckets(lengths, bucket_bytes or 0)]
        os.environ["GLOO_SOCKET_IFNAME"] = setup.options.get("interface", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{setup.scratch / 'rendezvous'}",
            rank=setup.rank,
            world_size=setup.num_workers,
        )
        self.settle()

    def step(self) -> None:
        works = [dist.all_reduce(tensor, async_op=self._together) for tensor in self._tensors]
        for work, tensor in zip(works, self._tensors, strict=True):
            if work is not None:
                work.wait()
            tensor /= self._num_workers

    def check(self) -> None:
        assert all(bool((tensor == self._expected).all()) for tensor in self._tensors), "wrong average"

    def settle(self) -> None:
        for tensor in self._tensors:
            tensor.fill_(self._gradient)


def _buckets(lengths: list[int], bucket_bytes: int) -> list[int]:
    """Joins neighbouring lengths while they fit into one bucket of float32."""
    buckets: list[int] = []
    for length in lengths:
        if buckets and 4 * (buckets[-1] + length) <= bucket_bytes:
            buckets[-1] += length
        else:
            buckets.append(length)
    return buckets


if __name__ == "__main__":
    run_worker(AllReduceWorker, packages=["torch"])
