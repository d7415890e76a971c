"""A worker of a round of several accumulators: a push_pull of each, all at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import gradserve
from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.peers.gradserve.connection import Connection
from gradserve_protocol.placement import home_of


class PartsWorker(Worker):
    """Averages the parts of a model, of which each server has as many."""

    def __init__(self, setup: Setup) -> None:
        self._num_workers = setup.num_workers
        self._worker = f"worker{setup.rank}"
        self._step = 0
        self._connection = Connection.of(setup)
        num_parts = int(setup.options["num_parts"])
        self._gradient = self._connection.gradient((setup.num_floats // num_parts,), setup.rank + 1)
        num_servers = len(setup.server["address"].split(","))
        whole = {"sharded": False} if num_servers > 1 else {}
        self._parts = [
            self._connection.client.gradient_accumulator({"part": self._gradient}, name, **whole)
            for name in _names(num_parts, num_servers)
        ]
        self._threads = ThreadPoolExecutor(num_parts)
        self._averages: list[gradserve.PushPullResult] = []

    def step(self) -> None:
        self._averages = list(self._threads.map(self._push_pull, self._parts))

    def _push_pull(self, part: gradserve.GradientAccumulator) -> gradserve.PushPullResult:
        return part.push_pull({"part": self._gradient}, self._num_workers, self._step, worker_id=self._worker)

    def settle(self) -> None:
        self._step += 1
        self._averages = []

    def check(self) -> None:
        for average in self._averages:
            assert np.all(average["part"] == (self._num_workers + 1) / 2), "wrong average"


def _names(num_parts: int, num_servers: int) -> list[str]:
    """Returns names of which each server has as many."""
    names: list[str] = []
    number = 0
    while len(names) < num_parts:
        if home_of("", f"part{number}", num_servers) == len(names) % num_servers:
            names.append(f"part{number}")
        number += 1
    return names


if __name__ == "__main__":
    run_worker(PartsWorker, packages=["gradserve", "grpcio", "protobuf", "numpy"])
