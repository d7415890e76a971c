"""A worker that pushes its gradient to parameters on the server, and gets the version that its round makes."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.peers.gradserve.connection import Connection
from benchmarks.workloads.steps import BETAS, EPSILON, LEARNING_RATE, MOMENTUM, expected_value
from gradserve import optim

_OPTIMIZERS = {
    "momentum": optim.SGD(LEARNING_RATE, momentum=MOMENTUM),
    "adam": optim.Adam(LEARNING_RATE, BETAS, EPSILON),
}


class ParametersWorker(Worker):
    """Pushes an array, and pulls an array."""

    def __init__(self, setup: Setup) -> None:
        self._num_workers = setup.num_workers
        self._connection = Connection.of(setup)
        self._gradient = {"x": self._connection.gradient((setup.num_floats,), setup.rank + 1)}
        self._result: Any = None
        self._step = 0
        self._optimizer = setup.options["optimizer"]
        self._parameters = self._connection.client.parameters(
            {"x": np.zeros(setup.num_floats, np.float32)},
            shared_name="model",
            refuse_non_finite=setup.options["refuse_non_finite"],
            optimizer=_OPTIMIZERS[self._optimizer],
            update="gradient",
            num_required=setup.num_workers,
            sharded=setup.options.get("sharded", False),
        )

    def step(self) -> None:
        self._result = self._parameters.push_pull(self._gradient, self._step, **self._connection.reading).version

    def settle(self) -> None:
        self._step = self._result.step
        self._result = None

    def check(self) -> None:
        mean = (self._num_workers + 1) / 2
        expected = expected_value(self._optimizer, mean, self._result.step)
        assert np.allclose(self._result["x"], expected, rtol=1e-5), "wrong parameters"


if __name__ == "__main__":
    run_worker(ParametersWorker, packages=["gradserve", "grpcio", "protobuf", "numpy", "xxhash"])
