"""Batch normalisation by a gradserve server, with arrays over the wire or tensors that are on the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gradserve
from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.workloads.batch_norm import EPSILON, BatchNormInputs


class BatchNormWorker(Worker):
    """Makes one call per step. With `by_handle` the images are on the server already, and the results stay there."""

    def __init__(self, setup: Setup) -> None:
        self._inputs = inputs = BatchNormInputs(setup)
        self._keep = bool(setup.options["by_handle"])
        self._client = gradserve.connect(setup.server["address"], timeout=60)
        self._result: Any = None
        self._op: Callable[[], Any]
        images: Any = {"x": inputs.x, "y_backprop": inputs.y_backprop}
        if self._keep:
            images = {name: self._client.put(array) for name, array in images.items()}
        common: Any = {"epsilon": EPSILON, "data_format": inputs.data_format, "keep": self._keep, "scale": inputs.scale}
        ops = self._client.raw_ops
        if inputs.is_gradient:
            moments: Any = {"reserve_space_1": inputs.mean, "reserve_space_2": inputs.variance}
            self._op = lambda: ops.FusedBatchNormGradV3(**images, **moments, **common)
        else:
            nothing: Any = {"mean": [], "variance": []}
            self._op = lambda: ops.FusedBatchNormV3(x=images["x"], offset=inputs.offset, **nothing, **common)

    def step(self) -> None:
        self._result = self._op()

    def settle(self) -> None:
        if self._keep:
            self._client.delete(*self._result)
        self._result = None

    def check(self) -> None:
        first = self._result[0]
        self._inputs.check(self._client.get(first) if self._keep else first)


if __name__ == "__main__":
    run_worker(BatchNormWorker, packages=["gradserve", "grpcio", "protobuf", "numba", "numpy"])
