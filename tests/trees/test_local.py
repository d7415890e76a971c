"""`connect(..., local_aggregator=N)`: the first worker of a host starts an aggregator, the others find it."""

import asyncio
import importlib.util
import os
import time
from pathlib import Path

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve import local_aggregator
from gradserve_testing import LocalServer
from tests.cluster.servers import addresses_of, running_cluster
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.processes import end_process
from tests.trees.processes import IDLE_SECONDS, running_in
from tests.trees.workers import at_once

GRADIENTS = [{"w": np.full(3, value, np.float32)} for value in (1.0, 3.0)]


def test_workers_share_one_and_it_ends_by_itself(folder: Path, top: LocalServer) -> None:
    clients = at_once(lambda _: gradserve.connect(top.address, local_aggregator=2), range(2))
    assert len(running_in(folder)) == 1
    assert clients[0].address == clients[1].address
    assert clients[0].address.startswith(f"unix:{folder}/gradserve-aggregators-{os.getuid()}/")
    assert clients[0].server_info().upstream == top.address
    made = [each.gradient_accumulator(GRADIENTS[0], "net") for each in clients]
    results = at_once(lambda acc, gradient: acc.push_pull(gradient, 2, 0), made, GRADIENTS)
    assert [each["w"][0] for each in results] == [2.0, 2.0]
    clients[0].close()
    time.sleep(2.5 * IDLE_SECONDS)
    assert len(running_in(folder)) == 1, "somebody still uses it"
    assert clients[1].server_info().upstream == top.address
    clients[1].close()
    eventually(lambda: running_in(folder), lambda running: not running)
    # The next one starts another.
    with gradserve.connect(top.address, local_aggregator=2) as client:
        assert client.list_accumulators()[0].name == "net"


def test_nobody_else_can_enter_its_folder(folder: Path, top: LocalServer) -> None:
    with gradserve.connect(top.address, local_aggregator=2):
        for each in folder.glob("gradserve-aggregators-*"):
            assert each.stat().st_mode & 0o777 == 0o700
            assert [inner.stat().st_mode & 0o777 for inner in each.iterdir()] == [0o700]


def test_a_folder_that_others_can_enter_is_refused(folder: Path, top: LocalServer) -> None:
    (folder / f"gradserve-aggregators-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(gradserve.UnavailableError, match="to be a folder that only this user can enter"):
        gradserve.connect(top.address, local_aggregator=2)


def test_other_servers_and_numbers_have_others(folder: Path, top: LocalServer) -> None:
    with (
        gradserve.connect(top.address, local_aggregator=2) as one,
        gradserve.connect(top.address, local_aggregator=3) as other,
    ):
        assert one.address != other.address
        assert len(running_in(folder)) == 2


async def test_the_async_face(folder: Path) -> None:
    """With two servers upstream, over which it shards the accumulator."""
    with running_cluster(2) as servers:
        addresses = addresses_of(servers)
        async with (
            gradserve.aio.connect(addresses, local_aggregator=2) as one,
            gradserve.aio.connect(addresses, local_aggregator=2) as two,
        ):
            made = [await each.gradient_accumulator(GRADIENTS[0], "net", sharded=True) for each in (one, two)]
            assert (await made[0].info()).num_shards == 2
            pulls = [acc.push_pull(gradient, 2, 0) for acc, gradient in zip(made, GRADIENTS, strict=True)]
            assert [each["w"][0] for each in await asyncio.gather(*pulls)] == [2.0, 2.0]


def test_the_environment_variable(folder: Path, top: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_LOCAL_AGGREGATOR", "2")
    with gradserve.connect(top.address) as client:
        assert client.server_info().upstream == top.address
    monkeypatch.setenv("GRADSERVE_LOCAL_AGGREGATOR", "two")
    with pytest.raises(gradserve.InvalidArgumentError, match="from 1 to 1024 for GRADSERVE_LOCAL_AGG"):
        gradserve.connect(top.address)


def test_one_that_was_killed_is_started_again_by_the_next_worker(
    folder: Path, top: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
    with gradserve.connect(top.address, local_aggregator=2) as first:
        acc = first.gradient_accumulator(GRADIENTS[0], "net")
        (process,) = running_in(folder)
        end_process(process)
        with gradserve.connect(top.address, local_aggregator=2) as second:
            assert second.address == first.address
            first.server_info()  # waits until gRPC tries again to connect, for both of them
            made = [acc, second.gradient_accumulator(GRADIENTS[0], "net")]
            results = at_once(lambda acc, gradient: acc.push_pull(gradient, 2, 0), made, GRADIENTS)
            assert [each["w"][0] for each in results] == [2.0, 2.0]


def test_one_that_does_not_start_says_why(folder: Path, top: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_aggregator, "_IDLE_SECONDS", "never")
    with pytest.raises(gradserve.UnavailableError, match="did not start: Error: --upstream-idle-seconds"):
        gradserve.connect(top.address, local_aggregator=2)


def test_without_the_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pydantic" else find_spec(name))
    with pytest.raises(gradserve.InvalidArgumentError, match=r"pip install '\.\[server\]'"):
        gradserve.connect("localhost:1", local_aggregator=2)


@pytest.mark.parametrize("number", [0, -1, 1025, True, 2.0, "2"])
def test_numbers_that_are_not_valid(number: object) -> None:
    with pytest.raises(gradserve.InvalidArgumentError, match="from 1 to 1024 for local_aggregator"):
        gradserve.connect("localhost:1", local_aggregator=number)  # type: ignore[arg-type]
