"""Fixtures of pytest, which users have from `gradserve.testing.fixtures`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import gradserve
from gradserve_testing import Faults, FaultyProxy, ServerProcess, ServerThread


@pytest.fixture(scope="session")
def gradserve_server() -> Iterator[ServerThread]:
    """A server that all tests share, so their accumulators and layers need names of their own."""
    with ServerThread() as server:
        yield server


@pytest.fixture
def gradserve_faults(gradserve_server: ServerThread) -> Iterator[Faults]:
    """The faults of the shared server, which end with the test."""
    yield gradserve_server.faults
    gradserve_server.faults.clear()


@pytest.fixture
def gradserve_client(gradserve_server: ServerThread) -> Iterator[gradserve.Client]:
    """A client of the shared server."""
    with gradserve.connect(gradserve_server.address) as client:
        yield client


@pytest.fixture
def gradserve_network(gradserve_server: ServerThread) -> Iterator[FaultyProxy]:
    """A network in front of the shared server; clients of `gradserve_network.address` need `transport="grpc"`."""
    with FaultyProxy(gradserve_server.address) as network:
        yield network


@pytest.fixture
def gradserve_process(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server in a process of its own with a state directory: it can be killed and started again."""
    folder = tmp_path / "gradserve"
    folder.mkdir()
    with ServerProcess(folder, "--state-dir", str(folder / "state"), "--warm-up", "false") as server:
        yield server
