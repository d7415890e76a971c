"""Workers that stream gradients for some seconds, and one, the last, that checks the server's health meanwhile."""

from __future__ import annotations

import time
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.peers.gradserve.connection import TIMEOUT_SECONDS, Connection

_PAUSE_SECONDS = 0.01
_NEVER_STALE = 2**62


class StreamingWorker(Worker):
    """Applies its gradient again and again; worker 0 also takes the average of what is there."""

    def __init__(self, setup: Setup) -> None:
        self._taker = setup.rank == 0
        self._seconds = setup.options["seconds"]
        self._connection = Connection.of(setup)
        self._gradient = self._connection.gradient((setup.num_floats,), 1.0)
        self._accumulator = self._connection.client.conditional_accumulator(
            "float32", shape=self._gradient.shape, shared_name="accumulator"
        )
        self._num_applied = 0

    def step(self) -> None:
        end = time.monotonic() + self._seconds
        self._num_applied = 0
        while time.monotonic() < end:
            self._accumulator.apply_grad(self._gradient, local_step=_NEVER_STALE)
            if self._taker:
                self._accumulator.take_grad(1, timeout=TIMEOUT_SECONDS, **self._connection.reading)
            self._num_applied += 1

    def check(self) -> None:
        assert self._num_applied > 0, "no gradient was applied"

    def report(self) -> dict[str, Any]:
        return {"seconds": [], "num_bytes": self._num_applied * self._gradient.nbytes}


class HealthWorker(Worker):
    """Checks the health over a channel of its own, as an orchestrator does."""

    def __init__(self, setup: Setup) -> None:
        self._seconds = setup.options["seconds"]
        channel = grpc.insecure_channel(setup.server["address"], options=[("grpc.enable_http_proxy", 0)])
        self._stub: Any = health_pb2_grpc.HealthStub(channel)  # its types do not know its methods
        self._latencies: list[float] = []
        self._healthy = True

    def step(self) -> None:
        self._latencies, self._healthy = [], True
        end = time.monotonic() + self._seconds
        while (start := time.monotonic()) < end:
            reply = self._stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
            self._latencies.append(time.monotonic() - start)
            self._healthy &= reply.status == health_pb2.HealthCheckResponse.SERVING
            time.sleep(_PAUSE_SECONDS)

    def check(self) -> None:
        assert self._healthy, "the server said that it does not serve"

    def report(self) -> dict[str, Any]:
        return {"seconds": self._latencies, "num_bytes": 0}


def make_worker(setup: Setup) -> Worker:
    """Returns the worker of a rank."""
    return HealthWorker(setup) if setup.rank == setup.num_workers - 1 else StreamingWorker(setup)


if __name__ == "__main__":
    run_worker(make_worker, packages=["gradserve", "grpcio", "protobuf", "numpy"])
