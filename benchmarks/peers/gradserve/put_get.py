"""A client that puts one array, or gets it."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.peers.gradserve.connection import Connection


class PutWorker(Worker):
    """Puts an array, and deletes it between steps."""

    def __init__(self, setup: Setup) -> None:
        self._client = Connection.of(setup).client
        self._array = _make_array(setup)
        self._handle: Any = None

    def step(self) -> None:
        self._handle = self._client.put(self._array)

    def settle(self) -> None:
        self._client.delete(self._handle)

    def check(self) -> None:
        assert np.array_equal(self._client.get(self._handle), self._array), "other data came back"


class GetWorker(Worker):
    """Gets an array that was put once."""

    def __init__(self, setup: Setup) -> None:
        self._client = Connection.of(setup).client
        self._array = _make_array(setup)
        self._handle = self._client.put(self._array)
        self._result: Any = None

    def step(self) -> None:
        self._result = self._client.get(self._handle)

    def settle(self) -> None:
        self._result = None

    def check(self) -> None:
        assert np.array_equal(self._result, self._array), "other data came back"


def make_worker(setup: Setup) -> Worker:
    """Returns the worker for `operation`."""
    return {"put": PutWorker, "get": GetWorker}[setup.options["operation"]](setup)


def _make_array(setup: Setup) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).random(setup.num_floats, np.float32)


if __name__ == "__main__":
    run_worker(make_worker, packages=["gradserve", "grpcio", "protobuf", "numpy"])
