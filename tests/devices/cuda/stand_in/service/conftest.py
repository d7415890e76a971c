"""A server on a simulated GPU, in the place of the server of all tests."""

import itertools
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradserve_server.config import RuntimeConfig, ServerConfig
from gradserve_testing import LocalServer
from tests.devices.cuda.stand_in.gpu.settings import Settings
from tests.devices.cuda.stand_in.installing import StandIn, installed

_FEW = 2
_MOST = {"test_ops.py": 1, "test_layers.py": 2, "test_accumulators.py": 1, "test_bad_input.py": 10}
"""How many cases of a test run, by module. All of them do if the environment has STAND_IN_ALL_CASES."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out most cases of long tables, others in each table: elsewhere they run on the CPU."""
    if "STAND_IN_ALL_CASES" in os.environ:
        return
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    # Accumulators without a server, and servers without the simulated GPU.
    left_out = {item for item in here if "[core" in item.nodeid or " in this process" in item.nodeid}
    here = [item for item in here if item not in left_out]
    for (path, _), group in itertools.groupby(here, lambda item: (item.path, item.nodeid.partition("[")[0])):
        cases, most = list(group), _MOST.get(path.name, _FEW)
        first = zlib.crc32(cases[0].nodeid.partition("[")[0].encode())
        kept = {(first + place * len(cases) // most) % len(cases) for place in range(most)}
        left_out |= {case for place, case in enumerate(cases) if place not in kept}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


@pytest.fixture(scope="module")
def stand_in(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    with installed(Settings(str(compiled), str(tmp_path_factory.mktemp("gpu") / "faults.txt"))) as made:
        yield made


@pytest.fixture(scope="module")
def server(_compiled_kernels: None, stand_in: StandIn) -> Iterator[LocalServer]:
    with LocalServer(
        ServerConfig(runtime=RuntimeConfig(device="cuda:0", accumulator_device="auto", warm_up=False))
    ) as local:
        yield local


@pytest.fixture(scope="module")
def server_address(server: LocalServer) -> str:
    return server.address


@pytest.fixture(scope="module")
def _prepared_ops(server: LocalServer) -> None:
    server.wait_until_prepared()


@pytest.fixture(autouse=True)
def _no_faults(stand_in: StandIn) -> Iterator[None]:
    """Each test names its own faults."""
    yield
    stand_in.faults.check()
