"""Servers on a simulated GPU, in this process and in another one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import gradserve
from gradserve.testing import ServerProcess
from gradserve_server.config import RuntimeConfig, ServerConfig
from gradserve_testing import LocalServer
from tests.devices.cuda.stand_in.gpu.settings import Settings
from tests.devices.cuda.stand_in.installing import StandIn, installed
from tests.servers.polling import PATIENCE_SECONDS


@pytest.fixture
def gpu_settings(compiled: Path, tmp_path: Path) -> Settings:
    """Two GPUs of 1 GiB, of which a process may use the first."""
    return Settings(str(compiled), str(tmp_path / "faults.txt"))


@pytest.fixture
def stand_in(gpu_settings: Settings) -> Iterator[StandIn]:
    """CuPy's stand-in, in place of CuPy for this test."""
    with installed(gpu_settings) as made:
        yield made


@pytest.fixture
def gpu_server(stand_in: StandIn) -> Iterator[LocalServer]:
    """A server in a thread of this process, whose ops run on `cuda:0`."""
    with LocalServer(ServerConfig(runtime=RuntimeConfig(device="cuda:0", warm_up=False))) as local:
        yield local


@pytest.fixture
def gpu_client(gpu_server: LocalServer) -> Iterator[gradserve.Client]:
    with gradserve.connect(gpu_server.address, timeout=PATIENCE_SECONDS) as client:
        yield client


@pytest.fixture
def gpu_process(gpu_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    """`gradserve serve --device cuda:0` in a process of its own, which must not make a mistake."""
    for name, value in gpu_settings.variables().items():
        monkeypatch.setenv(name, value)
    with ServerProcess(tmp_path, "--device", "cuda:0") as process:
        yield process
    faults = Path(str(gpu_settings.report))
    assert not faults.exists(), faults.read_text()
