"""A server with something on it, and the command line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import gradserve
from gradserve_protocol.variables import RESTART_PATIENCE_VARIABLE
from gradserve_server.commands import servers
from gradserve_server.commands.cli import cli
from gradserve_server.config import ListenConfig, ServerConfig
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.runtime import NOT_WARMED_UP


@dataclass(frozen=True)
class CommandLine:
    """Runs commands that talk to one server."""

    address: str

    def run(self, *arguments: str, answer: str | None = None) -> Result:
        """Runs a command in this process, which does not wait for a server that is not there to return."""
        variables = {"GRADSERVE_ADDRESS": self.address, RESTART_PATIENCE_VARIABLE: "0"}
        return CliRunner().invoke(cli, arguments, env=variables, input=answer)

    def json(self, *arguments: str) -> Any:
        """Returns what a command prints with --json."""
        done = self.run(*arguments, "--json")
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell waits for a second when it completes a word; a busy machine may take longer."""
    monkeypatch.setattr(servers, "_COMPLETION_SECONDS", PATIENCE_SECONDS)


@pytest.fixture(scope="package")
def local() -> Iterator[LocalServer]:
    config = ServerConfig(listen=ListenConfig(http_listen="off"), runtime=NOT_WARMED_UP)
    with LocalServer(config) as server:
        yield server


@pytest.fixture(scope="package")
def client(local: LocalServer) -> Iterator[gradserve.Client]:
    with gradserve.connect(local.address) as connected:
        yield connected


@pytest.fixture(scope="package")
def trained(client: gradserve.Client) -> str:
    """Returns the name of an accumulator in which "slow" was last in round 1, and too late for round 2."""
    acc = client.conditional_accumulator("float32", (3,), shared_name="trained/net")
    gradient = np.ones(3, np.float32)
    for step, workers in enumerate((["fast", "slow"], ["fast"])):
        for worker in workers:
            acc.apply_grad(gradient, local_step=step, worker_id=worker)
        acc.take_grad(len(workers))
    acc.apply_grad(gradient, local_step=1, worker_id="slow")
    acc.apply_grad(gradient, local_step=2, worker_id="fast")
    return "trained/net"


@pytest.fixture
def command_line(local: LocalServer) -> CommandLine:
    return CommandLine(local.address)
