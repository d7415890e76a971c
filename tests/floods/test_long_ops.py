"""Ops that would never end: they keep sums waiting for nothing, and end with their calls, or with the server."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.transport.settings import Transport
from gradserve_server.config import LimitsConfig, RuntimeConfig, ServerConfig
from gradserve_server.devices.compute import checkpoint
from gradserve_server.devices.device import Device
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.ops.layer_norm.spec import ForwardOutputs
from gradserve_server.ops.operation import Family
from gradserve_server.parts import Parts, make_all_families
from gradserve_server.resources.budget import Purpose
from gradserve_testing import LocalServer
from tests.servers.connecting import connect_with, without_retries
from tests.servers.polling import PATIENCE_SECONDS, eventually, growing_limits

NUM_THREADS = 2
X = np.zeros((400, 400), np.float32)
"""Too much for the event loop, and so little that it travels with the call."""
SUMMED = np.ones(1 << 19, np.float32)
"""2 MiB: too much for the event loop, so a thread adds it up."""


@dataclass
class EndlessLayerNorm:
    """A family whose op ends only at a checkpoint."""

    running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Has no kernels."""

    def forward(self, *_: Any) -> ForwardOutputs:
        with self.lock:
            self.running += 1
        try:
            while True:
                checkpoint()
                time.sleep(0.001)  # others want the processor
        finally:
            with self.lock:
                self.running -= 1

    def make(self, device: Device, parallel: ForkJoin) -> Mapping[str, Family]:
        return {**make_all_families(device, parallel), "layer_norm": self}


@pytest.fixture
def endless() -> EndlessLayerNorm:
    return EndlessLayerNorm()


@contextmanager
def serving(endless: EndlessLayerNorm) -> Iterator[LocalServer]:
    config = ServerConfig(
        limits=LimitsConfig.model_validate({"max_bytes": 1 << 28}),
        runtime=RuntimeConfig(warm_up=False, compute_threads=NUM_THREADS, drain_seconds=0.05),
    )
    with LocalServer(config, Parts(make_families=endless.make)) as server:
        yield server


def layer_norm(client: gradserve.Client) -> object:
    params = np.zeros(X.shape[1], np.float32)
    return client.raw_ops.LayerNorm(x=X, scale=params, offset=params)


@contextmanager
def flooded(local: LocalServer, endless: EndlessLayerNorm, transport: Transport, timeout: float) -> Iterator[list[Any]]:
    """Makes more calls than there are threads for ops; yields their futures once these are all busy, or time is up."""
    settings = without_retries(timeout, transport)
    num_calls = NUM_THREADS + 1
    clients = [connect_with(local.address, settings) for _ in range(num_calls)]
    with ThreadPoolExecutor(num_calls) as callers:
        calls: list[Future[object]] = [callers.submit(layer_norm, client) for client in clients]
        eventually(lambda: endless.running == NUM_THREADS or all(call.done() for call in calls))
        yield calls
    for client in clients:
        client.close()


def memory_used(local: LocalServer) -> int:
    return local.inspect(lambda server: server.budgets.memory.used_for[Purpose.COMPUTING])


def test_they_end_with_their_calls(endless: EndlessLayerNorm) -> None:
    with serving(endless) as local:
        for transport in (Transport.GRPC, Transport.BULK, Transport.SHARED_MEMORY):
            for limit in growing_limits():
                with flooded(local, endless, transport, timeout=limit) as calls:
                    were_busy = endless.running == NUM_THREADS
                    for call in calls:
                        with pytest.raises(gradserve.DeadlineExceededError):
                            call.result(PATIENCE_SECONDS)
                if were_busy:
                    break
            eventually(lambda: (endless.running, memory_used(local)), lambda seen: seen == (0, 0))


def test_neither_sums_nor_a_server_that_stops_wait_for_them(endless: EndlessLayerNorm) -> None:
    with ExitStack() as server, ExitStack() as clients:
        local = server.enter_context(serving(endless))
        calls = clients.enter_context(flooded(local, endless, Transport.GRPC, timeout=10 * PATIENCE_SECONDS))
        client = clients.enter_context(gradserve.connect(local.address, timeout=PATIENCE_SECONDS))
        accumulator = client.gradient_accumulator({"w": SUMMED})
        accumulator.apply_grad({"w": SUMMED})
        assert accumulator.take_grad(1).gradients["w"][0] == 1
        assert not [call for call in calls if call.done()]
        server.close()
        assert endless.running == 0
        for call in calls:
            with pytest.raises(gradserve.UnavailableError):
                call.result(PATIENCE_SECONDS)
