"""GRUBlockCell by a gradserve server, with arrays over the wire or tensors that are on the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradserve
from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.workloads.gru_block_cell import GRUInputs


class GRUWorker(Worker):
    """Makes one call per step. With `by_handle` all inputs are on the server already, and the results stay there."""

    def __init__(self, setup: Setup) -> None:
        self._inputs = inputs = GRUInputs(setup)
        self._keep = bool(setup.options["by_handle"])
        self._client = gradserve.connect(setup.server["address"], timeout=60)
        self._result: Any = None
        self._op: Callable[[], Any]
        arrays: Any = inputs.gradient if inputs.is_gradient else inputs.cell
        if self._keep:
            arrays = {name: self._client.put(array) for name, array in arrays.items()}
        ops = self._client.raw_ops
        if inputs.is_gradient:
            self._op = lambda: ops.GRUBlockCellGrad(**arrays, keep=self._keep)
        else:
            self._op = lambda: ops.GRUBlockCell(**arrays, keep=self._keep)

    def step(self) -> None:
        self._result = self._op()

    def settle(self) -> None:
        if self._keep:
            self._client.delete(*self._result)
        self._result = None

    def check(self) -> None:
        output = self._result.d_h_prev if self._inputs.is_gradient else self._result.h
        self._inputs.check(self._client.get(output) if self._keep else output)


if __name__ == "__main__":
    run_worker(GRUWorker, packages=["gradserve", "grpcio", "protobuf", "numba", "numpy"])
