"""What can be upstream of an aggregator, and how it shows."""

import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import gradserve
from gradserve_server.commands.cli import cli
from gradserve_server.config import ListenConfig, SecurityConfig, ServerConfig, TlsConfig
from gradserve_testing import LocalServer
from tests.cluster.servers import addresses_of, name_at, running_cluster
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.runtime import NOT_WARMED_UP
from tests.trees.servers import aggregator, running_tree
from tests.trees.workers import at_once, clients_of

GRADIENTS = [{"w": np.full(3, value, np.float32)} for value in (1.0, 3.0)]


def test_a_cluster_of_two_servers() -> None:
    with (
        running_cluster(2) as servers,
        aggregator(",".join(addresses_of(servers)), 2) as near,
        clients_of(near.address, 2) as clients,
    ):
        names = [name_at(home, 2) for home in range(2)]
        for name in names:
            made = [each.gradient_accumulator(GRADIENTS[0], name) for each in clients]
            results = at_once(lambda acc, gradient: acc.push_pull(gradient, 2, 0), made, GRADIENTS)
            assert [each["w"][0] for each in results] == [2.0, 2.0]
            at_once(lambda acc, gradient: acc.apply_grad(gradient, 1), made, GRADIENTS)
            assert made[0].take_grad(2)["w"][0] == 2.0
            assert made[1].read_average(2)["w"][0] == 2.0
        for server, name in zip(servers, names, strict=True):
            with gradserve.connect(server.address) as one:
                assert [each.name for each in one.list_accumulators()] == [name]
        private = clients[0].gradient_accumulator(GRADIENTS[0])
        assert [each.name for each in clients[0].list_accumulators()] == sorted([*names, private.name])
        assert near.server.counts.sums == 4


def test_pages_of_long_lists() -> None:
    with (
        running_cluster(2) as servers,
        aggregator(",".join(addresses_of(servers)), 2) as near,
        gradserve.connect(near.address) as client,
    ):
        names = [f"acc{number:03}" for number in range(230)]
        for name in names:
            client.conditional_accumulator("float32", (), shared_name=name)
        assert [each.name for each in client.list_accumulators()] == names


def test_an_aggregator_of_aggregators() -> None:
    with (
        LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as top,
        aggregator(top.address, 4) as middle,
        aggregator(middle.address, 2) as left,
        aggregator(middle.address, 2) as right,
        clients_of(left.address, 2) as clients,
        clients_of(right.address, 2) as others,
    ):
        made = [each.gradient_accumulator({"w": np.zeros(5, np.float16)}, "net") for each in (*clients, *others)]
        values = np.random.default_rng(5).standard_normal((4, 5)).astype(np.float16)
        weights = [1.0, 2.0, 0.5, 4.0]
        for step in range(2):
            results = at_once(
                lambda acc, value, weight, worker, step=step: acc.push_pull(
                    {"w": value}, 4, step, weight=weight, worker_id=worker
                ),
                made,
                list(values),
                weights,
                "abcd",
            )
            expected = np.average(values.astype(np.float64), axis=0, weights=weights)
            for each in results:
                assert (each.num_gradients, each.total_weight, sorted(each.worker_ids)) == (4, 7.5, list("abcd"))
                np.testing.assert_allclose(each["w"].astype(np.float64), expected, rtol=2**-10, atol=2**-12)
        assert (middle.server.counts.sums, middle.server.counts.gradients) == (2, 8)


def test_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The aggregator shows its own token; those of its workers are for itself."""
    access = tmp_path / "access.toml"
    made = CliRunner().invoke(cli, ["token"]).output
    token, digest = re.findall(r"gradserve_\S+|sha256:\w+", made)
    access.write_text(f'[identities.host]\ntokens = ["{digest}"]\nroles = {{ "*" = "worker" }}\n')
    top_config = ServerConfig(runtime=NOT_WARMED_UP, security=SecurityConfig(access=str(access)))
    with LocalServer(top_config) as top:
        with (
            aggregator(top.address, 2) as near,
            gradserve.connect(near.address) as client,
            pytest.raises(gradserve.PermissionDeniedError, match="the server upstream: .* is that of the aggregator"),
        ):
            client.list_accumulators()
        monkeypatch.setenv("GRADSERVE_TOKEN", token)
        with aggregator(top.address, 2) as near, gradserve.connect(near.address) as client:
            assert client.list_accumulators() == []


def test_an_aggregator_says_what_it_is() -> None:
    with (
        LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as top,
        aggregator(top.address, 2, listen=ListenConfig(http_listen="127.0.0.1:0")) as near,
        clients_of(near.address, 2) as clients,
    ):
        assert clients[0].server_info().upstream == top.address
        shown = CliRunner().invoke(cli, ["info", near.address]).output
        assert f"aggregator, which passes gradients on to: {top.address}" in shown
        with gradserve.connect(top.address) as client:
            assert client.server_info().upstream == ""
        made = [each.gradient_accumulator(GRADIENTS[0], "net") for each in clients]
        at_once(lambda acc, gradient: acc.push_pull(gradient, 2, 0), made, GRADIENTS)
        made[0].read_average()
        metrics = urllib.request.urlopen(clients[0].server_info().http_url + "metrics").read().decode()
        for line in (
            f'gradserve_upstream_info{{address="{top.address}"}} 1.0',
            "gradserve_upstream_gradients_total 2.0",
            'gradserve_upstream_sent_total{kind="sum"} 1.0',
            'gradserve_upstream_sent_total{kind="alone"} 0.0',
            "gradserve_upstream_reads_total 1.0",
            "gradserve_upstream_downloads_total 0.0",
        ):
            assert line in metrics


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--upstream", "h:1"], "--upstream-workers: expected upstream_workers as well"),
        (["--upstream-workers", "2"], "--upstream-workers: expected upstream as well"),
        (
            ["--upstream", "h:1", "--upstream-workers", "0"],
            "--upstream-workers: expected a whole number from 1 to 1024",
        ),
        (["--upstream", "h:99999", "--upstream-workers", "2"], "--upstream: "),
        (["--upstream", "h:1,h:1", "--upstream-workers", "2"], "--upstream: expected different addresses"),
        (["--upstream-users-file", "x"], "--upstream-users-file: expected upstream as well"),
    ],
)
def test_settings_that_are_not_valid(flags: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["serve", *flags])
    assert result.exit_code == 2
    assert re.search(message, result.output), result.output


def test_variables_that_are_not_valid() -> None:
    """A server that is to be reached with TLS is not reached without."""
    done = subprocess.run(
        [sys.executable, "-m", "gradserve_server", "serve", "--upstream", "localhost:1", "--upstream-workers", "2"],
        env={**os.environ, "GRADSERVE_TLS": "maybe", "GRADSERVE_LISTEN": "127.0.0.1:0"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "Error: expected on or off for GRADSERVE_TLS, got 'maybe'\n")


def test_a_server_stops_while_gradients_wait() -> None:
    with running_tree(2) as (_, near), gradserve.connect(near.address) as client:
        acc = client.gradient_accumulator(GRADIENTS[0], "net")
        with pytest.raises(gradserve.DeadlineExceededError, match="0 gradients are in"):
            acc.push_pull(GRADIENTS[0], 2, 0, timeout=0.2)


def test_an_encrypted_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are those of the commands; workers on the host need nothing of it."""
    made = CliRunner().invoke(cli, ["certificates", str(tmp_path), "--host", "127.0.0.1", "--client", "host"])
    assert made.exit_code == 0, made.output
    files = {name: str(tmp_path / name) for name in ("ca.pem", "server.pem", "server.key", "host.pem", "host.key")}
    tls = TlsConfig(tls_certificate=files["server.pem"], tls_key=files["server.key"], tls_client_ca=files["ca.pem"])
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP, tls=tls)) as top:
        monkeypatch.setenv("GRADSERVE_TLS_CA", files["ca.pem"])
        monkeypatch.setenv("GRADSERVE_TLS_CLIENT_CERTIFICATE", files["host.pem"])
        monkeypatch.setenv("GRADSERVE_TLS_CLIENT_KEY", files["host.key"])
        with aggregator(top.address, 2) as near, clients_of(near.address, 2) as clients:
            made_there = [each.gradient_accumulator(GRADIENTS[0], "net") for each in clients]
            results = at_once(lambda acc, gradient: acc.push_pull(gradient, 2, 0), made_there, GRADIENTS)
            assert [each["w"][0] for each in results] == [2.0, 2.0]
