"""A worker that sends small gradients, to parameters or to an accumulator, while others may wait for a version.

With `num_waiting`, so many calls of an asyncio client in the worker's process wait for a step that is never reached.
They share a connection of gRPC.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import gradserve.aio
from benchmarks.peers.driver import Setup, Worker, run_worker
from benchmarks.peers.gradserve.connection import TIMEOUT_SECONDS, Connection
from gradserve import optim

_NEVER = 2**40
_CALLS = 20
_MOST_THREADS = 100
"""The most threads of a server, however many calls wait."""


class SmallUpdatesWorker(Worker):
    """Sends some gradients in a step."""

    def __init__(self, setup: Setup) -> None:
        self._pid = int(setup.server["pid"])
        self._connection = Connection.of(setup)
        client, shape = self._connection.client, (setup.num_floats,)
        self._gradient = self._connection.gradient(shape, 1.0)
        self._step = 0
        self._kind = setup.options["kind"]
        options: dict[str, Any] = {"optimizer": optim.SGD(0.125), "update": "gradient", "one_per_worker": False}
        self._options = options
        if self._kind == "apply_grad":
            self._model = client.gradient_accumulator({"x": self._gradient}, shared_name="model")
        else:
            options |= {"one_per_worker": False, "num_required": 1 if self._kind == "rounds" else _NEVER}
            self._model = client.parameters({"x": np.zeros(shape, np.float32)}, shared_name="model", **options)
        self._waiting = 0
        if num_waiting := int(setup.options.get("num_waiting", 0)):
            thread = threading.Thread(
                target=lambda: asyncio.run(self._wait(setup.server["address"], num_waiting)), daemon=True
            )
            thread.start()
            self._wait_for(num_waiting)

    def step(self) -> None:
        for _ in range(_CALLS):
            if self._kind == "apply_grad":
                self._model.apply_grad({"x": self._gradient}, local_step=0)
            else:
                self._step = self._model.push({"x": self._gradient}, self._step).step

    def check(self) -> None:
        status = Path(f"/proc/{self._pid}/status").read_text(encoding="utf-8")
        num_threads = int(status.partition("Threads:")[2].split()[0])
        assert num_threads <= _MOST_THREADS, f"the server has {num_threads} threads"
        if self._kind == "rounds":
            assert self._model.info().step == self._step, "a round is missing"

    async def _wait(self, address: str, num_waiting: int) -> None:
        async with gradserve.aio.connect(address, timeout=10 * TIMEOUT_SECONDS, transport="grpc") as client:
            (name,) = [each.name for each in await client.list_parameters()]
            shape = {"x": gradserve.DenseSpec("float32", self._gradient.shape)}
            parameters = await client.parameters(shape, shared_name=name, **self._options)
            await asyncio.gather(*[parameters.wait(_NEVER) for _ in range(num_waiting)])

    def _wait_for(self, num_waiting: int) -> None:
        while self._connection.client.server_info().usage["num_waiters"] < num_waiting:
            time.sleep(0.1)


if __name__ == "__main__":
    run_worker(SmallUpdatesWorker, packages=["gradserve", "grpcio", "protobuf", "numpy"])
