"""A worker that averages a model's gradients with one `push_pull`, so that every worker gets the average.

The model is a ResNet-50's 161 tensors, or one tensor if `num_bytes` is given.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.peers.gradserve.connection import Connection
from benchmarks.workloads.resnet50 import parameter_shapes


class PushPullWorker(Worker):
    """Pushes arrays, and pulls arrays."""

    def __init__(self, setup: Setup) -> None:
        self._num_workers = setup.num_workers
        self._local_step = 0
        shapes = {"x": (setup.num_floats,)} if "num_bytes" in setup.options else parameter_shapes()
        self._connection = Connection.of(setup)
        self._gradients = {name: self._connection.gradient(shape, setup.rank + 1) for name, shape in shapes.items()}
        self._result: Any = None
        checks = {"refuse_non_finite": True} if setup.options.get("refuse_non_finite") else {}
        self._model = self._connection.client.gradient_accumulator(self._gradients, shared_name="model", **checks)

    def step(self) -> None:
        self._result = self._model.push_pull(
            self._gradients,
            num_required=self._num_workers,
            local_step=self._local_step,
            **self._connection.reading,
        )

    def settle(self) -> None:
        self._local_step = self._result.step
        self._result = None

    def check(self) -> None:
        expected = (self._num_workers + 1) / 2
        assert set(self._result) == set(self._gradients)
        assert all(np.all(self._result[name] == expected) for name in self._gradients), "wrong average"


if __name__ == "__main__":
    run_worker(PushPullWorker, packages=["gradserve", "grpcio", "protobuf", "numpy"])
