"""What status, commands and metrics show of a training run: its accumulator, not what it makes for itself beside."""

import urllib.request

from click.testing import CliRunner

import gradserve
from gradserve_server.commands.cli import cli
from gradserve_server.config import ListenConfig, ServerConfig
from gradserve_server.resources.runs import run_of
from gradserve_testing import LocalServer
from tests.servers.runtime import NOT_WARMED_UP
from tests.training.replicas import Replica


def test_a_run_that_has_ended_normally_is_one_accumulator_without_errors() -> None:
    config = ServerConfig(listen=ListenConfig(http_listen="127.0.0.1:0"), runtime=NOT_WARMED_UP)
    with LocalServer(config) as server, gradserve.connect(server.address) as client:
        with Replica(client, "line", "anna", 1).begin() as anna:
            anna.train()
        status = client.server_status()
        assert [each.name for each in status.accumulators] == ["line"]
        assert status.num_accumulators == 1
        assert status.errors == ()
        found = client.server_status(name_contains="/answers")
        assert [run_of(each.name) for each in found.accumulators] == ["line"]
        assert len(client.server_status(name_contains=found.accumulators[0].name).accumulators) == 1
        run = CliRunner().invoke(cli, ["ls", server.address])
        assert [line.split()[1] for line in run.stdout.splitlines()[1:]] == ["line"]
        with urllib.request.urlopen(f"{client.server_info().http_url}metrics") as answer:
            metrics = answer.read().decode()
        assert 'accumulator="line"' in metrics
        assert "/answers" not in metrics
