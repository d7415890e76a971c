"""A worker of a round: it applies its gradient; worker 0 then takes the average."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
from google.protobuf.wrappers_pb2 import BytesValue, Int64Value

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.peers.naive.service import OPTIONS, Stub


class RoundWorker(Worker):
    """Applies and takes with the usual copies: `tobytes` on the way out, `frombuffer` on the way in."""

    def __init__(self, setup: Setup) -> None:
        self._num_workers = setup.num_workers
        self._taker = setup.rank == 0
        self._gradient = np.full(setup.num_floats, setup.rank + 1, np.float32)
        self._average: np.ndarray[Any, np.dtype[np.float32]] | None = None
        channel = grpc.insecure_channel(setup.server["address"], options=OPTIONS)
        grpc.channel_ready_future(channel).result(timeout=30)
        self._stub = Stub(channel)

    def step(self) -> None:
        self._stub.Apply(BytesValue(value=self._gradient.tobytes()))
        if self._taker:
            reply = self._stub.Take(Int64Value(value=self._num_workers))
            self._average = np.frombuffer(reply.value, np.float32)

    def settle(self) -> None:
        self._average = None

    def check(self) -> None:
        if self._taker:
            assert np.all(self._average == (self._num_workers + 1) / 2), "wrong average"


if __name__ == "__main__":
    run_worker(RoundWorker, packages=["grpcio", "protobuf", "numpy"])
