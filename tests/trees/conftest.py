"""What tests of local aggregators share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradserve import local_aggregator
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.servers.processes import end_process
from tests.servers.runtime import NOT_WARMED_UP
from tests.trees.processes import IDLE_SECONDS, running_in


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The runtime folder of the user, with a path that is short enough for sockets; ends what runs there."""
    with tempfile.TemporaryDirectory(prefix="trees-", ignore_cleanup_errors=True) as made:
        path = Path(made)
        monkeypatch.setenv("XDG_RUNTIME_DIR", made)
        monkeypatch.setattr(local_aggregator, "_IDLE_SECONDS", IDLE_SECONDS)
        yield path
        for each in running_in(path):
            end_process(each)


@pytest.fixture
def top() -> Iterator[LocalServer]:
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
        yield server
