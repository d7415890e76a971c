"""GRUBlockCell by gradserve's kernels, without a server, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.workloads.gru_block_cell import GRUInputs
from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.products import use_one_blas_thread
from gradserve_server.ops.gru.cpu import CpuGRU
from gradserve_server.ops.gru.spec import (
    CellAttributes,
    CellInputs,
    GradAttributes,
    GradInputs,
    plan_cell,
    plan_gradient,
)
from gradserve_server.runtime.process import keep_freed_memory


class GRUWorker(Worker):
    """Makes one call per step, with outputs from the pool and one thread for BLAS, as in the server."""

    def __init__(self, setup: Setup) -> None:
        keep_freed_memory()
        use_one_blas_thread()
        kernels = CpuGRU(CpuDevice(BufferPool(1 << 30)), ForkJoin(setup.options["num_threads"]))
        kernels.prepare(lambda: False)
        self._inputs = inputs = GRUInputs(setup)
        self._result: Any = None
        self._op: Callable[[], Any]
        if inputs.is_gradient:
            arrays, attributes = GradInputs(**inputs.gradient), GradAttributes()
            self._op = lambda: kernels.gradient(arrays, attributes, plan_gradient(arrays, attributes).sizes).d_h_prev
        else:
            cell = CellInputs(**inputs.cell)
            self._op = lambda: kernels.cell(cell, plan_cell(cell, CellAttributes()).sizes).h

    def step(self) -> None:
        self._result = self._op()

    def settle(self) -> None:
        self._result = None

    def check(self) -> None:
        self._inputs.check(self._result)


if __name__ == "__main__":
    run_worker(GRUWorker, packages=["gradserve", "numba", "numpy"])
