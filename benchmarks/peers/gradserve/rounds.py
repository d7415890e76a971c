"""A worker of a round: it applies its gradient; worker 0 then takes the average."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.peers.gradserve.connection import TIMEOUT_SECONDS, Connection


class RoundWorker(Worker):
    """Applies an array, and takes one."""

    def __init__(self, setup: Setup) -> None:
        self._num_workers = setup.num_workers
        self._taker = setup.rank == 0
        self._local_step = 0
        self._connection = Connection.of(setup)
        self._gradient = self._connection.gradient((setup.num_floats,), setup.rank + 1)
        self._average: Any = None
        self._accumulator = self._connection.client.conditional_accumulator(
            "float32", shape=self._gradient.shape, shared_name="accumulator"
        )

    def step(self) -> None:
        self._accumulator.apply_grad(self._gradient, local_step=self._local_step)
        if self._taker:
            self._average = self._accumulator.take_grad(
                self._num_workers, timeout=TIMEOUT_SECONDS, **self._connection.reading
            )

    def settle(self) -> None:
        self._local_step += 1
        self._average = None

    def check(self) -> None:
        if self._taker:
            assert np.all(self._average == (self._num_workers + 1) / 2), "wrong average"


if __name__ == "__main__":
    run_worker(RoundWorker, packages=["gradserve", "grpcio", "protobuf", "numpy"])
