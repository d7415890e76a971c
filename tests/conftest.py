"""A real server on a free port, and clients of it; a GPU for the tests that are marked `cuda`."""

import contextlib
import gc
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import gradserve
from gradserve.transport.route import PROXY_VARIABLES
from gradserve_server.devices.host.products import use_one_blas_thread
from gradserve_server.observe import calls
from gradserve_testing import LocalServer
from tests.accumulators.bench import Bench
from tests.collection import few_collections_of_garbage, first_alone
from tests.devices.cuda.gpu import has_gpu
from tests.devices.cuda.stand_in.fixtures import gpu_client, gpu_process, gpu_server, gpu_settings, stand_in
from tests.servers.kernels import compile_once
from tests.servers.polling import PATIENCE_SECONDS
from tests.suite import order, selection, tables
from tests.suite.progress import Progress
from tests.suite.selection import pytest_ignore_collect
from tests.suite.tables import pytest_runtest_protocol

__all__ = ["gpu_client", "gpu_process", "gpu_server", "gpu_settings", "stand_in"]  # fixtures of every test
__all__ += ["pytest_ignore_collect", "pytest_runtest_protocol"]  # hooks

os.environ["GRADSERVE_RESTART_PATIENCE"] = "0"  # servers that are gone do not come back, but for the tests of that
os.environ["GRADSERVE_WARM_UP"] = "false"  # most servers in processes of their own need no kernels: a second for each
settings.register_profile("no limit of time", deadline=None)  # a busy machine is slow
settings.load_profile("no limit of time")


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.pytest_addoption(parser)
    tables.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and config.get_verbosity() < 0:
        config.pluginmanager.register(Progress(config))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    with contextlib.ExitStack() as during:
        during.enter_context(few_collections_of_garbage())
        if hasattr(session.config, "workerinput"):
            during.enter_context(first_alone(Path(session.config.getoption("basetemp")).parent))
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = selection.select(config, items)
    if not config.getoption("collectonly"):
        if not has_gpu():
            for item in items:
                if item.get_closest_marker("cuda"):
                    item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and CuPy"))
        if not config.getoption("--each-case"):
            tables.fold(items)
        if (worker := getattr(config, "workerinput", None)) is not None:
            order.long_ones_first(items, worker["workercount"])
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session", autouse=True)
def _no_proxies() -> Iterator[None]:
    """Whatever proxies the environment has, the tests' own channels go straight to this machine."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in (*PROXY_VARIABLES, "no_grpc_proxy", "no_proxy"):
            patch.delenv(variable, raising=False)
        yield


@pytest.fixture(autouse=True)
def _outside_of_calls() -> Iterator[None]:
    """The record of a call that a test makes is not the current one of the next test."""
    before = calls._CURRENT.set(None)
    yield
    calls._CURRENT.reset(before)


@pytest.fixture(scope="session", autouse=True)
def _own_runtime_folder() -> Iterator[None]:
    """Servers of these tests find no sockets of other processes, and wait for none."""
    # Not in pytest's folders: a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="gs-") as folder, pytest.MonkeyPatch.context() as patch:
        Path(folder).chmod(0o1777)  # some tests' servers are other users'
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_blas_thread() -> None:
    """As in a server. Its own threads spin while they wait, and take the processor from the other worker."""
    use_one_blas_thread()


@pytest.fixture(scope="module", autouse=True)
def _set_aside() -> Iterator[None]:
    """Sets aside the objects that outlive the tests of a module: later collections of garbage do not look at them."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _compiled_kernels(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> None:
    """The kernels are in Numba's cache: whoever needs them loads them in a second."""
    folder = tmp_path_factory.getbasetemp()
    compile_once(folder if worker_id == "master" else folder.parent)


@pytest.fixture(scope="session")
def server(_compiled_kernels: None) -> Iterator[LocalServer]:
    """A server in a thread of this process; tests share it, so they use names of their own."""
    with LocalServer() as local:
        yield local


@pytest.fixture(scope="session")
def server_address(server: LocalServer) -> str:
    return server.address


@pytest.fixture(scope="session")
def _prepared_ops(server: LocalServer) -> None:
    """The kernels of the server are loaded: NumPy and they do not take turns, and nothing in the process changes the
    filters of warnings, as loading them does for a moment."""
    server.wait_until_prepared()


@pytest.fixture
def client(server_address: str) -> Iterator[gradserve.Client]:
    with gradserve.connect(server_address, timeout=PATIENCE_SECONDS) as connected:
        yield connected


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return uuid.uuid4().hex


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Where programs of GPUs are compiled to, for the CPU: shared by the workers of a run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "emulated"
    folder.mkdir(exist_ok=True)
    return folder
