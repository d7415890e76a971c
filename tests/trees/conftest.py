"""What tests of local aggregators share."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradserve import local_aggregator
from gradserve_server.config import ServerConfig
from gradserve_server.testing import LocalServer
from tests.servers.runtime import NOT_WARMED_UP
from tests.trees.processes import IDLE_SECONDS, running_in


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The runtime folder of the user, with a path that is short enough for sockets; ends what runs there."""
    path = Path(tempfile.mkdtemp(prefix="trees-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    monkeypatch.setattr(local_aggregator, "_IDLE_SECONDS", IDLE_SECONDS)
    yield path
    for each in running_in(path):
        each.kill()
        each.wait()
    shutil.rmtree(path)


@pytest.fixture
def top() -> Iterator[LocalServer]:
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
        yield server
