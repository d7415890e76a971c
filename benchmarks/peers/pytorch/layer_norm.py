"""Layer normalization by PyTorch's native ops, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.workloads.layer_norm import EPSILON, LayerNormInputs


class LayerNormWorker(Worker):
    """Makes one call per step."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.options["num_threads"])
        torch.set_grad_enabled(False)
        self._inputs = inputs = LayerNormInputs(setup)
        self._result: Any = None
        self._op: Callable[[], Any]
        x, dy, scale, offset = map(torch.from_numpy, (inputs.x, inputs.y_backprop, inputs.scale, inputs.offset))
        shape = scale.shape
        if inputs.is_gradient:
            stats = [torch.from_numpy(array)[:, None] for array in (inputs.mean, inputs.rstd)]
            others = (*stats, scale, offset, [True, True, True])
            self._op = lambda: torch.ops.aten.native_layer_norm_backward(dy, x, shape, *others)
        else:
            self._op = lambda: torch.ops.aten.native_layer_norm(x, shape, scale, offset, EPSILON)

    def step(self) -> None:
        self._result = self._op()

    def settle(self) -> None:
        self._result = None

    def check(self) -> None:
        self._inputs.check(self._result[0].numpy())


if __name__ == "__main__":
    run_worker(LayerNormWorker, packages=["torch"])
