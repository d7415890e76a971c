"""A worker of a server with a state directory: it applies gradients; a round of several ends between two steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peers.disk.file import PreparedFile
from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.peers.gradserve.connection import TIMEOUT_SECONDS, Connection

_FLUSH_BYTES = 4096


class DurableWorker(Worker):
    """Applies the gradients of a step. If there is one, takes the average in the same step.

    Options: `durability`; `num_gradients`; `written`, how many times the bytes of a gradient the step writes to a file
    besides, to compare with.
    """

    def __init__(self, setup: Setup) -> None:
        self._num_gradients = int(setup.options["num_gradients"])
        self._written = int(setup.options["num_bytes"] * setup.options["written"])
        self._file = PreparedFile(setup.scratch / "file", self._written) if self._written else None
        self._local_step = 0
        self._connection = Connection.of(setup)
        self._gradient = self._connection.gradient((setup.num_floats,), 3)
        self._average: Any = None
        self._accumulator = self._connection.client.conditional_accumulator(
            "float32",
            shape=self._gradient.shape,
            shared_name="accumulator",
            durability=setup.options["durability"],
        )

    def step(self) -> None:
        for _ in range(self._num_gradients):
            self._accumulator.apply_grad(self._gradient, local_step=self._local_step)
        if self._num_gradients == 1:
            self._take()
        if self._file is not None:
            self._file.write(self._written)
            self._file.write(_FLUSH_BYTES)

    def settle(self) -> None:
        if self._num_gradients > 1:
            self._take()
        self._local_step += 1

    def check(self) -> None:
        assert self._average is None or np.all(self._average == 3), "wrong average"

    def _take(self) -> None:
        self._average = None
        self._average = self._accumulator.take_grad(
            self._num_gradients, timeout=TIMEOUT_SECONDS, **self._connection.reading
        )


if __name__ == "__main__":
    run_worker(DurableWorker, packages=["gradserve", "grpcio", "protobuf", "numpy"])
