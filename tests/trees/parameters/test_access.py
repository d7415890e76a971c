"""Roles, metrics and the end of an aggregator that forwards updates."""

import urllib.request
from pathlib import Path

import numpy as np
import pytest

import gradserve
from gradserve_server.config import ListenConfig, SecurityConfig, ServerConfig
from gradserve_testing import LocalServer
from tests.security.serving import TOKENS, all_entries
from tests.servers.runtime import NOT_WARMED_UP
from tests.trees.servers import aggregator, running_tree
from tests.trees.workers import at_once, clients_of

W = np.ones(3, np.float32)


def test_roles_are_those_at_the_aggregator(tmp_path: Path) -> None:
    access = tmp_path / "access.toml"
    access.write_text(all_entries())
    with (
        LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as top,
        aggregator(top.address, 1, security=SecurityConfig(access=str(access))) as near,
        gradserve.connect(near.address, token=TOKENS["worker"]) as worker,
        gradserve.connect(near.address, token=TOKENS["chief"]) as chief,
        gradserve.connect(near.address, token=TOKENS["visitor"]) as visitor,
    ):
        with pytest.raises(gradserve.PermissionDeniedError, match="chief"):
            worker.parameters({"w": W}, shared_name="net", container="team")
        # The worker has not got the turn to create them, for which the chief would wait.
        chief.parameters({"w": W}, shared_name="net", container="team")
        made = worker.parameters({"w": W}, shared_name="net", container="team")
        assert made.push_pull({"w": W}, 0).version["w"].tolist() == [2, 2, 2]
        made.save(tmp_path / "saved")
        for refused in (lambda: made.change(num_required=2), made.delete, lambda: made.load(tmp_path / "saved")):
            with pytest.raises(gradserve.PermissionDeniedError):
                refused()
        with pytest.raises(gradserve.PermissionDeniedError):
            visitor.parameters({"w": W}, shared_name="net", container="team")
        assert chief.parameters({"w": W}, shared_name="net", container="team").change(num_required=2).step == 1


def test_metrics() -> None:
    with (
        LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as top,
        aggregator(top.address, 2, listen=ListenConfig(http_listen="127.0.0.1:0")) as near,
        clients_of(near.address, 2) as clients,
        gradserve.connect(top.address) as client,
    ):
        made = [each.parameters({"w": W}, shared_name="net", num_required=2) for each in clients]
        at_once(lambda each, worker: each.push_pull({"w": W}, 0, worker_id=worker), made, "ab")
        made[0].read()
        metrics = urllib.request.urlopen(clients[0].server_info().http_url + "metrics").read().decode()
        for line in (
            "gradserve_upstream_gradients_total 2.0",
            'gradserve_upstream_sent_total{kind="sum"} 1.0',
            'gradserve_upstream_sent_total{kind="alone"} 0.0',
            "gradserve_upstream_reads_total 1.0",
            "gradserve_upstream_downloads_total 0.0",
        ):
            assert line in metrics
        assert client.parameters({"w": W}, shared_name="net").info().step == 1


def test_a_server_stops_while_updates_wait() -> None:
    with running_tree(2) as (_, near), gradserve.connect(near.address) as client:
        made = client.parameters({"w": W}, shared_name="net", num_required=2)
        with pytest.raises(gradserve.DeadlineExceededError, match="0 updates are in"):
            made.push_pull({"w": W}, 0, timeout=0.2)
