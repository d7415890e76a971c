"""A worker that streams bytes to the server, from it, or both in turn."""

from __future__ import annotations

from benchmarks.peers.ceiling.wire import Stub
from benchmarks.peers.driver import Setup, Worker, run_worker


class StreamWorker(Worker):
    """Streams bytes. With the operation "round" every worker puts, and worker 0 then gets; none waits for others."""

    def __init__(self, setup: Setup) -> None:
        operation = setup.options["operation"]
        self._num_bytes = int(setup.options["num_bytes"])
        self._stub = Stub(setup.server["address"])
        self._calls = []
        if operation != "get":
            self._calls.append(self._stub.put)
        if operation == "get" or (operation == "round" and setup.rank == 0):
            self._calls.append(self._stub.get)
        self._moved: list[int] = []

    def step(self) -> None:
        self._moved = [call(self._num_bytes) for call in self._calls]

    def check(self) -> None:
        assert self._moved == [self._num_bytes] * len(self._calls), "bytes are missing"


if __name__ == "__main__":
    run_worker(StreamWorker, packages=["grpcio"])
