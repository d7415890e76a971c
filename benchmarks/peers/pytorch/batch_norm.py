"""Batch normalisation by PyTorch's native ops, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.workloads.batch_norm import EPSILON, BatchNormInputs


class BatchNormWorker(Worker):
    """Makes one call per step. NHWC is channels_last: dimensions in the order NCHW, memory in the order NHWC."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.options["num_threads"])
        torch.set_grad_enabled(False)
        self._inputs = inputs = BatchNormInputs(setup)
        self._result: Any = None
        self._op: Callable[[], Any]
        x, dy = (self._images(array) for array in (inputs.x, inputs.y_backprop))
        scale, offset = torch.from_numpy(inputs.scale), torch.from_numpy(inputs.offset)
        if inputs.is_gradient:
            mean = torch.from_numpy(inputs.mean)
            inverse = torch.rsqrt(torch.from_numpy(inputs.variance) + EPSILON)
            moments = (None, None, mean, inverse, True, EPSILON, [True, True, True])
            self._op = lambda: torch.ops.aten.native_batch_norm_backward(dy, x, scale, *moments)
        else:
            options = (None, None, True, 1.0, EPSILON)
            self._op = lambda: torch.ops.aten.native_batch_norm(x, scale, offset, *options)

    def step(self) -> None:
        self._result = self._op()

    def settle(self) -> None:
        self._result = None

    def check(self) -> None:
        result = self._result[0]
        self._inputs.check(result.permute(0, 2, 3, 1).numpy() if self._inputs.axis == -1 else result.numpy())

    def _images(self, array: Any) -> torch.Tensor:
        images = torch.from_numpy(array)
        return images.permute(0, 3, 1, 2) if self._inputs.axis == -1 else images


if __name__ == "__main__":
    run_worker(BatchNormWorker, packages=["torch"])
