"""Writes gradients to disk, one after the other."""

from __future__ import annotations

from benchmarks.peers.disk.file import PreparedFile
from benchmarks.peers.driver import Setup, Worker, run_worker


class WriteWorker(Worker):
    """Writes as much as the gradients of a step have."""

    def __init__(self, setup: Setup) -> None:
        self._num_bytes = int(setup.options["num_bytes"])
        self._num_gradients = int(setup.options["num_gradients"])
        self._file = PreparedFile(setup.scratch / "file", self._num_bytes)

    def step(self) -> None:
        for _ in range(self._num_gradients):
            self._file.write(self._num_bytes)

    def check(self) -> None:
        """Nothing can be wrong."""


if __name__ == "__main__":
    run_worker(WriteWorker, packages=[])
