"""Tensors on their way to a simulated GPU and back, which copies as late as it may."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve_server.config import RuntimeConfig, ServerConfig
from gradserve_testing import LocalServer
from tests.devices.cuda.stand_in.installing import StandIn
from tests.servers.polling import PATIENCE_SECONDS

WAYS = ("grpc", "shared_memory")
SIZES = (1, 1000, (1 << 19) + 3, 3 << 19)
"""In float32: less than a message, than a slot, a part of one more, several."""


@pytest.fixture
def server(stand_in: StandIn, tmp_path: Path) -> Iterator[LocalServer]:
    config = ServerConfig(runtime=RuntimeConfig(device="cuda:0", warm_up=False))
    with LocalServer(config, address=f"unix:{tmp_path / 'socket'}") as local:
        yield local


def arrays(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(size).astype(np.float32) for size in SIZES]


def go_there_and_back(server: LocalServer, way: Any, seed: int) -> None:
    given = arrays(seed)
    with gradserve.connect(server.address, timeout=PATIENCE_SECONDS, transport=way) as client:
        for _ in range(2):
            handles = client.put_all(given, device="auto")
            for found, expected in zip(client.get_all(handles, release=True), given, strict=True):
                np.testing.assert_array_equal(found, expected)


def num_bytes(server: LocalServer) -> float:
    with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
        return client.server_info().usage["num_bytes"]


@pytest.mark.parametrize("way", WAYS)
def test_what_goes_there_comes_back(server: LocalServer, way: str) -> None:
    go_there_and_back(server, way, 0)
    assert num_bytes(server) == 0


def test_many_clients_at_once(server: LocalServer) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda seed: go_there_and_back(server, WAYS[seed % 2], seed), range(4)))
    assert num_bytes(server) == 0


def test_inputs_and_outputs_of_ops(server: LocalServer) -> None:
    x = np.random.default_rng(0).standard_normal((4, 32, 32, 64)).astype(np.float32)
    ones = np.ones(64, np.float32)
    arguments: Any = {"scale": ones, "offset": ones, "mean": ones[:0], "variance": ones[:0]}
    with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
        expected = client.raw_ops.FusedBatchNormV3(x=client.put(x, device="auto"), **arguments).y
        for _ in range(3):
            np.testing.assert_array_equal(client.raw_ops.FusedBatchNormV3(x=x, **arguments).y, expected)
    mean, variance = x.mean((0, 1, 2), np.float64), x.var((0, 1, 2), dtype=np.float64)
    np.testing.assert_allclose(expected, (x - mean) / np.sqrt(variance + 1e-4) + 1, atol=1e-4)
