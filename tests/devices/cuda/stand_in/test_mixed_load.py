"""Many clients at once, with a bit of everything, on a GPU with little memory whose streams run in any order."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve_server.config import RuntimeConfig, ServerConfig
from gradserve_testing import LocalServer
from tests.devices.cuda.stand_in.gpu.settings import Settings
from tests.devices.cuda.stand_in.installing import StandIn, installed
from tests.servers.polling import PATIENCE_SECONDS, eventually

NUM_CLIENTS, NUM_ROUNDS = 6, 6
CHANNELS, SIZE = 5, 3000


@pytest.fixture(params=[1, 2])
def crowded(request: pytest.FixtureRequest, gpu_settings: Settings) -> Iterator[tuple[StandIn, LocalServer]]:
    """A GPU of 32 MiB, with a seed for the order of its work, and a server on it with accumulators there."""
    runtime = RuntimeConfig(device="cuda:0", accumulator_device="auto", warm_up=False)
    settings = gpu_settings.but(seed=request.param, total_bytes=32 << 20)
    with installed(settings) as stand_in, LocalServer(ServerConfig(runtime=runtime)) as local:
        yield stand_in, local


def test_everything_at_once(crowded: tuple[StandIn, LocalServer]) -> None:
    stand_in, server = crowded
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        list(threads.map(lambda number: _work(server.address, number), range(NUM_CLIENTS)))
    with gradserve.connect(server.address, timeout=PATIENCE_SECONDS) as client:
        assert client.list_tensors() == []
        eventually(lambda: client.server_info().usage["num_handles"] == 0)
    stand_in.faults.check()


def _work(address: str, number: int) -> None:
    random = np.random.default_rng(number)
    x = random.standard_normal((2, 6, 6, CHANNELS)).astype(np.float32)
    per_channel: Any = {"scale": np.ones(CHANNELS, np.float32), "offset": np.zeros(CHANNELS, np.float32)}
    nothing: Any = {"mean": per_channel["scale"][:0], "variance": per_channel["scale"][:0]}
    with gradserve.connect(address, timeout=PATIENCE_SECONDS) as client:
        model = client.gradient_accumulator({"w": np.zeros(SIZE, np.float32)}, shared_name="model")
        for step in range(NUM_ROUNDS):
            stored = client.put(x + np.float32(step), device="auto")
            kept = client.raw_ops.FusedBatchNormV3(x=stored, **per_channel, **nothing, keep=True)
            y = client.get(kept.y, release=True)
            np.testing.assert_allclose(y.mean((0, 1, 2)), 0, atol=1e-5)
            h = _gru(client, random)
            np.testing.assert_array_less(np.abs(h), 1)
            average = model.push_pull(
                {"w": np.full(SIZE, number, np.float32)}, num_required=NUM_CLIENTS, local_step=step
            )
            np.testing.assert_array_equal(average["w"], np.full(SIZE, (NUM_CLIENTS - 1) / 2, np.float32))
            client.delete(stored, *(each for name, each in kept._asdict().items() if name != "y"))


def _gru(client: gradserve.Client, random: np.random.Generator) -> Any:
    def normal(*shape: int) -> Any:
        return (random.standard_normal(shape) / 4).astype(np.float32)

    weights: Any = {"w_ru": normal(7, 8), "w_c": normal(7, 4), "b_ru": normal(8), "b_c": normal(4)}
    return client.raw_ops.GRUBlockCell(x=normal(2, 3), h_prev=normal(2, 4), **weights).h
