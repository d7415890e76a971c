"""Layer normalization by gradserve's kernels, without a server, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.workloads.layer_norm import EPSILON, LayerNormInputs
from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.ops.layer_norm.cpu import CpuLayerNorm
from gradserve_server.ops.layer_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    GradAttributes,
    GradInputs,
    plan_forward,
    plan_gradient,
)
from gradserve_server.runtime.process import keep_freed_memory


class LayerNormWorker(Worker):
    """Makes one call per step, with outputs from the pool, as in the server."""

    def __init__(self, setup: Setup) -> None:
        keep_freed_memory()
        kernels = CpuLayerNorm(CpuDevice(BufferPool(1 << 30)), ForkJoin(setup.options["num_threads"]))
        kernels.prepare(lambda: False)
        self._inputs = inputs = LayerNormInputs(setup)
        self._result: Any = None
        self._op: Callable[[], Any]
        if inputs.is_gradient:
            arrays = GradInputs(inputs.y_backprop, inputs.x, inputs.scale, inputs.mean, inputs.rstd)
            self._op = lambda: kernels.gradient(arrays, plan_gradient(arrays, GradAttributes()).geometry).x_backprop
        else:
            given, attributes = ForwardInputs(inputs.x, inputs.scale, inputs.offset), ForwardAttributes(EPSILON)
            self._op = lambda: kernels.forward(given, attributes, plan_forward(given, attributes).geometry).y

    def step(self) -> None:
        self._result = self._op()

    def settle(self) -> None:
        self._result = None

    def check(self) -> None:
        self._inputs.check(self._result)


if __name__ == "__main__":
    run_worker(LayerNormWorker, packages=["gradserve", "numba", "numpy"])
