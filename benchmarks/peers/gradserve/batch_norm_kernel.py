"""Batch normalisation by gradserve's kernels, without a server, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.workloads.batch_norm import EPSILON, BatchNormInputs
from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.ops.batch_norm.cpu import CpuBatchNorm
from gradserve_server.ops.batch_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    GradAttributes,
    GradInputs,
    plan_forward,
    plan_gradient,
)
from gradserve_server.runtime.process import keep_freed_memory


class BatchNormWorker(Worker):
    """Makes one call per step, with outputs from the pool, as in the server."""

    def __init__(self, setup: Setup) -> None:
        keep_freed_memory()
        kernels = CpuBatchNorm(CpuDevice(BufferPool(1 << 30)), ForkJoin(setup.options["num_threads"]))
        kernels.prepare(lambda: False)
        self._inputs = inputs = BatchNormInputs(setup)
        self._result: Any = None
        self._op: Callable[[], Any]
        if inputs.is_gradient:
            arrays = GradInputs(inputs.y_backprop, inputs.x, inputs.scale, inputs.mean, inputs.variance)
            attributes = GradAttributes(epsilon=EPSILON, data_format=inputs.data_format)
            self._op = lambda: (
                kernels.gradient(arrays, attributes, plan_gradient(arrays, attributes).geometry).x_backprop
            )
        else:
            nothing = inputs.mean[:0]
            images = ForwardInputs(inputs.x, inputs.scale, inputs.offset, nothing, nothing)
            options = ForwardAttributes(epsilon=EPSILON, data_format=inputs.data_format)
            self._op = lambda: kernels.forward(images, options, plan_forward(images, options).geometry).y

    def step(self) -> None:
        self._result = self._op()

    def settle(self) -> None:
        self._result = None

    def check(self) -> None:
        self._inputs.check(self._result)


if __name__ == "__main__":
    run_worker(BatchNormWorker, packages=["gradserve", "numba", "numpy"])
