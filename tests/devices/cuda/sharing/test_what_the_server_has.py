"""What a server has open of its clients' memory, while they live and afterwards."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gradserve
from gradserve_server.rpc.listeners.sockets import context as gpu_access
from gradserve_server.rpc.listeners.sockets.context import GpuAccess
from gradserve_testing import LocalServer
from tests.devices.cuda.stand_in.gpu.settings import Settings
from tests.devices.cuda.stand_in.installing import StandIn
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.processes import end_process

_WORKER = Path(__file__).with_name("worker.py")


class Process:
    """A client in another process; see `worker`."""

    def __init__(self, address: str, settings: Settings) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(_WORKER), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | settings.variables(),
        )
        with ExitStack() as failing:
            failing.callback(end_process, self.process)
            assert self.line() == "ready"
            failing.pop_all()

    def begin(self, function: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{function}\n")
        self.process.stdin.flush()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def does(self, function: str) -> str:
        self.begin(function)
        return self.line()

    def ends(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(PATIENCE_SECONDS)
        end_process(self.process)

    def is_killed(self) -> None:
        end_process(self.process)


@pytest.fixture
def start(server_here: LocalServer, gpu_settings: Settings) -> Iterator[Callable[[], Process]]:
    started: list[Process] = []

    def start() -> Process:
        started.append(Process(server_here.address, gpu_settings))
        return started[-1]

    yield start
    for each in started:
        each.is_killed()


class Open:
    """What the server has open."""

    def __init__(self, server: LocalServer, stand_in: StandIn) -> None:
        self._server, self._ipc = server, stand_in.cupy._machine.IPC

    def now(self) -> tuple[int, int]:
        """The number of allocations that CUDA has open, and the bytes that count."""
        return len(self._ipc._opened), self._server.inspect(lambda server: server.sockets.context.fair.gpu_bytes.used)

    def are_none(self) -> None:
        eventually(self.now, (0, 0).__eq__)


@pytest.fixture
def opened(server_here: LocalServer, stand_in: StandIn) -> Open:
    return Open(server_here, stand_in)


def test_nothing_is_copied_to_the_host_and_all_is_closed_at_the_end(
    start: Callable[[], Process], opened: Open, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = []
    runtime = stand_in.cupy.cuda.runtime
    copy = runtime.memcpyAsync

    def noted(target: int, source: int, size: int, kind: int, stream: int) -> None:
        kinds.append(kind)
        copy(target, source, size, kind, stream)

    monkeypatch.setattr(runtime, "memcpyAsync", noted)
    first, second = start(), start()
    assert [each.does("put") for each in (first, second, first)] == ["in place"] * 3
    open_now, num_bytes = opened.now()
    assert open_now >= 2
    assert num_bytes >= 2 * 80_000
    assert not {runtime.memcpyDeviceToHost, runtime.memcpyHostToDevice} & set(kinds)
    first.ends()
    eventually(lambda: opened.now()[0], lambda left: 0 < left < open_now)
    second.ends()
    opened.are_none()


@pytest.mark.parametrize("moment", ["idle", "in a call"])
def test_a_killed_worker_leaves_nothing(
    start: Callable[[], Process], opened: Open, server_here: LocalServer, moment: str
) -> None:
    worker = start()
    assert worker.does("put") == "in place"
    if moment == "in a call":
        assert worker.does("pushes") == "begun"
        eventually(lambda: server_here.inspect(lambda server: server.registry.factory.waiters.used), (1).__eq__)
    assert opened.now()[0]
    worker.is_killed()
    opened.are_none()
    assert start().does("put") == "in place", "the server goes on"


def test_few_allocations_are_open_at_a_time(start: Callable[[], Process], opened: Open) -> None:
    worker = start()
    assert worker.does("many") == "in place"
    assert opened.now()[0] <= 33


def test_there_are_limits(start: Callable[[], Process], opened: Open, server_here: LocalServer) -> None:
    budget = server_here.inspect(lambda server: server.sockets.context.fair.gpu_bytes)
    budget.limit = 1000
    worker = start()
    assert "copied to the host: too many bytes of clients' GPU memory" in worker.does("put")
    opened.are_none()


def how_it_travels(server: LocalServer, gpu: Any) -> str:
    """Stores an array from this process; returns how it travelled."""
    with gradserve.connect(server.address) as client:
        client.put(gpu.empty((10,)))
        return client.server_info().transport.gpu_arrays


def test_a_client_of_another_user(server_here: LocalServer, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    another = SimpleNamespace(getuid=lambda: os.getuid() + 1, getpid=lambda: os.getpid() + 1)
    monkeypatch.setattr(gpu_access, "os", another)
    assert how_it_travels(server_here, gpu).startswith("copied to the host: the server is another user's")


def test_a_client_in_the_same_process(server_here: LocalServer, gpu: Any) -> None:
    assert "the server is in the same process" in how_it_travels(server_here, gpu)


ME, OTHER, HERE, THERE = 10, 20, 1, 2


@pytest.mark.parametrize(
    ("users", "uid", "pid", "why"),
    [
        ("user", ME, THERE, ""),
        ("user", OTHER, THERE, "another user's"),
        ("user", None, THERE, "another user's"),
        ("all", OTHER, THERE, ""),
        ("all", ME, HERE, "the same process"),
        ("off", ME, THERE, "does not allow it"),
    ],
)
def test_who_may_hand_over_memory(
    users: Any, uid: int | None, pid: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_access, "os", SimpleNamespace(getuid=lambda: ME, getpid=lambda: HERE))
    there: Any = object()
    found = GpuAccess(there, users).why_not(uid, pid)
    assert why in found
    assert bool(why) is bool(found)
    assert ("computes on the CPU" if users != "off" else why) in GpuAccess(None, users).why_not(uid, pid)
