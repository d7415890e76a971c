"""A server on a simulated GPU, in another process, for all tests of a module."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradserve.testing import ServerProcess
from gradserve_protocol.gpu import GpuArray
from gradserve_server.config import RuntimeConfig, ServerConfig
from gradserve_testing import LocalServer
from tests.devices.cuda.stand_in.gpu.settings import Settings
from tests.devices.cuda.stand_in.installing import StandIn


@pytest.fixture(scope="module")
def server_of_gpu(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    settings = Settings(str(compiled), str(folder / "faults.txt"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.variables().items():
            patch.setenv(name, value)
        process = ServerProcess(folder, "--device", "cuda:0", "--warm-up", "false")
        process.__enter__()
    try:
        yield process
    finally:
        process.__exit__()
    faults = folder / "faults.txt"
    assert not faults.exists(), faults.read_text()


@pytest.fixture
def server_here(stand_in: StandIn) -> Iterator[LocalServer]:
    """A server in a thread of this process, which prepares no kernels."""
    with LocalServer(ServerConfig(runtime=RuntimeConfig(device="cuda:0", warm_up=False))) as local:
        yield local


@pytest.fixture
def gpu(stand_in: StandIn) -> Any:
    """CuPy's stand-in, with a GPU for this thread."""
    stand_in.cupy.cuda.Device(0).use()
    return stand_in.cupy


@pytest.fixture
def to_host(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the arrays that the client has copied to the host, in bytes."""
    copied: list[int] = []
    copy = GpuArray.to_host

    def counted(array: GpuArray) -> Any:
        copied.append(array.nbytes)
        return copy(array)

    monkeypatch.setattr(GpuArray, "to_host", counted)
    return copied
