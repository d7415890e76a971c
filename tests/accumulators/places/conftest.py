"""A server with a simulated GPU for all tests of a module."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import gradserve
from gradserve_server.config import RuntimeConfig, ServerConfig
from gradserve_testing import LocalServer
from tests.devices.cuda.stand_in.gpu.settings import Settings
from tests.devices.cuda.stand_in.installing import installed
from tests.servers.polling import PATIENCE_SECONDS

ON_GPU = RuntimeConfig(device="cuda:0", accumulator_device="cuda:0", warm_up=False)


@pytest.fixture(scope="module")
def gpu(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server whose accumulators are on the GPU by default."""
    report = tmp_path_factory.mktemp("gpu") / "faults.txt"
    with installed(Settings(str(compiled), str(report))), LocalServer(ServerConfig(runtime=ON_GPU)) as local:
        yield local


@pytest.fixture
def worker(gpu: LocalServer) -> Iterator[gradserve.Client]:
    """A client. When it has gone, nothing of it may be left on the server."""
    with gradserve.connect(gpu.address, timeout=PATIENCE_SECONDS) as client:
        yield client
    assert gpu.inspect(lambda server: server.usage.memory.used) == 0
    assert gpu.inspect(lambda server: server.evictor.device.used if server.evictor else None) == 0
