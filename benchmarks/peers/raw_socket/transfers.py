"""A worker that sends bytes to the server, receives them, or both in turn."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.peers.raw_socket.wire import GET, PUT, REQUEST, receive


class TransferWorker(Worker):
    """Moves bytes, over several sockets at once if asked to. In a "round" every worker puts; worker 0 then gets."""

    def __init__(self, setup: Setup) -> None:
        num_sockets = int(setup.options.get("num_sockets", 1))
        num_bytes = int(setup.options["num_bytes"]) // num_sockets
        self._lines = [_Line(setup, num_bytes) for _ in range(num_sockets)]
        self._threads = ThreadPoolExecutor(num_sockets)

    def step(self) -> None:
        for done in [self._threads.submit(line.step) for line in self._lines]:
            done.result()

    def check(self) -> None:
        """A transfer that comes to its end is right: nobody looks at the bytes."""


class _Line:
    """One socket, and its part of the bytes."""

    def __init__(self, setup: Setup, num_bytes: int) -> None:
        operation = setup.options["operation"]
        self._num_bytes = num_bytes
        self._num_puts = setup.num_workers if operation == "round" else 0
        self._puts = operation != "get"
        self._gets = operation == "get" or (operation == "round" and setup.rank == 0)
        self._memory = memoryview(bytearray(self._num_bytes))
        self._answer = memoryview(bytearray(1))
        host, _, port = setup.server["address"].rpartition(":")
        self._connection = socket.create_connection((host, int(port)))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def step(self) -> None:
        """Moves the bytes once."""
        if self._puts:
            self._connection.sendall(REQUEST.pack(PUT, self._num_bytes, 0))
            self._connection.sendall(self._memory)
            receive(self._connection, self._answer)
        if self._gets:
            self._connection.sendall(REQUEST.pack(GET, self._num_bytes, self._num_puts))
            receive(self._connection, self._memory)


if __name__ == "__main__":
    run_worker(TransferWorker, packages=[])
