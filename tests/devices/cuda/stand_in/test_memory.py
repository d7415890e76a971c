"""A simulated GPU with little memory, as CUDA, CuPy, cuBLAS and the server share it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve_server.config import RuntimeConfig, ServerConfig
from gradserve_testing import LocalServer
from tests.devices.cuda.stand_in.gpu.settings import Settings
from tests.devices.cuda.stand_in.installing import StandIn
from tests.servers.polling import PATIENCE_SECONDS, eventually

TOTAL_BYTES = 16 << 20
LIMIT = 14 << 20
NUM_CLIENTS = 3
X = np.random.default_rng(0).standard_normal((4, 16, 32, 64)).astype(np.float32)
ONES = np.ones(64, np.float32)
PARAMS: Any = {"scale": ONES, "offset": ONES, "mean": ONES[:0], "variance": ONES[:0]}
H = np.random.default_rng(1).standard_normal((3, 5)).astype(np.float32)
GRU: Any = {
    "x": H,
    "h_prev": H,
    "w_ru": np.ones((10, 10), np.float32),
    "w_c": np.ones((10, 5), np.float32),
    "b_ru": np.ones(10, np.float32),
    "b_c": np.ones(5, np.float32),
}


@pytest.fixture
def gpu_settings(compiled: Path, tmp_path: Path) -> Settings:
    """A GPU of 16 MiB, an eighth of which is not for the pool."""
    settings = Settings(str(compiled), str(tmp_path / "faults.txt"))
    return settings.but(total_bytes=TOTAL_BYTES, cublas_bytes=1 << 16, module_bytes=1 << 10)


@pytest.fixture
def server(stand_in: StandIn) -> Iterator[LocalServer]:
    # Kernels that are loaded meanwhile would take memory too, and with it the failures that a test asks for.
    with LocalServer(ServerConfig(runtime=RuntimeConfig(device="cuda:0", warm_up=False))) as local:
        yield local


@pytest.fixture
def client(server: LocalServer) -> Iterator[gradserve.Client]:
    with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as connected:
        yield connected


def test_more_results_than_the_gpu_can_hold(server: LocalServer, stand_in: StandIn) -> None:
    """Clients keep 18 MiB of outputs and inputs; every one of them is right, wherever it is."""

    def work(seed: int) -> None:
        with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
            x = X + np.float32(seed)
            right = client.raw_ops.FusedBatchNormV3(x=x, **PARAMS).y
            kept = []
            for _ in range(6):
                given = client.put(x, device="auto")
                kept.append((given, client.raw_ops.FusedBatchNormV3(x=given, **PARAMS, keep=True)))
            for given, outputs in kept:
                np.testing.assert_array_equal(client.get(outputs.y), right)
                np.testing.assert_array_equal(client.raw_ops.FusedBatchNormV3(x=given, **PARAMS).y, right)
                np.testing.assert_array_equal(client.get(given), x)
                client.delete(given, *outputs)

    assert NUM_CLIENTS * 6 * 2 * X.nbytes == 18 << 20
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        list(threads.map(work, range(NUM_CLIENTS)))
    with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
        info = client.server_info()
    figures = info.device_usage
    assert figures["max_bytes"] == LIMIT
    assert figures["num_evicted"] > 0
    used = ("stored_bytes", "computing_bytes", "accumulator_bytes", "layer_bytes")
    assert [figures[name] for name in used] == [0] * len(used)
    assert info.usage["num_bytes"] == 0


def test_what_is_kept_for_later_is_given_back(client: gradserve.Client, stand_in: StandIn) -> None:
    handles = [client.put(X, device="auto") for _ in range(6)]
    client.delete(*handles)
    memory = stand_in.machine.memories[0]
    eventually(lambda: memory.used_bytes, lambda used: used <= LIMIT // 8 + (2 << 20))


@pytest.mark.parametrize(
    ("what", "times", "is_done"), [("malloc", 3, True), ("malloc", 6, False), ("cublas", 1, True), ("module", 1, True)]
)
def test_without_memory_an_op_is_computed_again(
    client: gradserve.Client, stand_in: StandIn, what: str, times: int, is_done: bool
) -> None:
    """CuPy's pool asks cudaMalloc three times before it gives up."""
    stand_in.machine.fail_next(what, times)
    if not is_done:
        with pytest.raises(gradserve.ResourceExhaustedError, match=r"\(--max-device-bytes\); Out of memory allocating"):
            client.raw_ops.GRUBlockCell(**GRU)
    outputs = client.raw_ops.GRUBlockCell(**GRU)
    assert outputs.h.shape == H.shape
    assert not stand_in.machine.fails(what), "all failures have happened"
