"""A worker that trains a ResNet-18 alone; those that train together are made of it."""

from __future__ import annotations

import copy

import torch

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.workloads.resnet18 import batch_of, resnet18


class TrainingWorker(Worker):
    """Takes one step of SGD at a time, always with the same batch."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.options["num_threads"])
        size = (setup.options["num_images"], setup.options["image_size"])
        self._batches = [batch_of(rank, *size) for rank in range(setup.num_workers)]
        self._images, self._labels = self._batches[setup.rank]
        self.model = resnet18()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.replica = self.model
        self._before = copy.deepcopy(self.model.state_dict())

    def step(self) -> None:
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.replica(self._images), self._labels).backward()
        self.optimizer.step()

    def settle(self) -> None:
        self._before = copy.deepcopy(self.model.state_dict())

    def check(self) -> None:
        """The gradients are the means of what each worker's batch gives with the weights before the step."""
        expected = resnet18()
        expected.load_state_dict(self._before)
        for images, labels in self._batches:
            loss = torch.nn.functional.cross_entropy(expected(images), labels) / len(self._batches)
            loss.backward()
        for mine, exact in zip(self.model.parameters(), expected.parameters(), strict=True):
            assert mine.grad is not None
            assert exact.grad is not None
            error = (mine.grad - exact.grad).abs().max()
            assert error <= 1e-3 * exact.grad.abs().max() + 1e-7, "wrong average"  # float32, sums in another order


if __name__ == "__main__":
    run_worker(TrainingWorker, packages=["torch"])
