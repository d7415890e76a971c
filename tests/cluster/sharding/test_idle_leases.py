"""A sharded accumulator that nobody uses ends on all servers; one that a call waits for at its home, on none."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.calls.accumulators.sharding import staging
from gradserve_server.app import Server
from gradserve_server.resources.registry import DEFAULT_CONTAINER, ResourceKey
from tests.cluster.servers import addresses_of, name_at
from tests.cluster.sharding.clients import MODEL, gradient, same, small_pieces
from tests.resources.clients.aging_server import AgingServer, aging_cluster, pass_time
from tests.servers.polling import PATIENCE_SECONDS, eventually

IDLE_LEASE = 30


@pytest.fixture
def servers() -> Iterator[Sequence[AgingServer]]:
    with aging_cluster(3) as running:
        yield running


@pytest.fixture
def client(servers: Sequence[AgingServer]) -> Iterator[gradserve.Client]:
    with small_pieces(), gradserve.connect(addresses_of(servers)) as connected:
        yield connected


def num_there(servers: Sequence[AgingServer]) -> list[int]:
    return [each.inspect(lambda server: server.registry.factory.count.used) for each in servers]


def make(client: gradserve.Client) -> Any:
    return client.gradient_accumulator(
        MODEL, shared_name=name_at(0, 3), idle_lease=IDLE_LEASE, sharded=True, keep_averages=1
    )


def test_nobody_uses_it(client: gradserve.Client, servers: Sequence[AgingServer]) -> None:
    make(client).apply_grad(gradient(1))
    for each in servers:
        pass_time(each, IDLE_LEASE - 1)
    assert num_there(servers) == [1, 1, 1]
    for each in servers:
        pass_time(each, 2)
    assert num_there(servers) == [0, 0, 0]


@pytest.mark.parametrize("call", ["take_grad", "read_average", "push_pull"])
def test_a_call_waits_for_it(
    client: gradserve.Client, servers: Sequence[AgingServer], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(staging, "USES_PER_LEASE", 3000)  # every 10 ms, as the clients' time does not pass faster
    model = make(client)
    model.apply_grad(gradient(1))
    calls: Mapping[str, Callable[[], Any]] = {
        "take_grad": lambda: model.take_grad(2),
        "read_average": lambda: model.read_average(1),
        "push_pull": lambda: model.push_pull(gradient(1), 3),
    }
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(calls[call])
        eventually(lambda: left(servers[0]) == IDLE_LEASE)
        for _ in range(4):
            for each in servers:
                pass_time(each, IDLE_LEASE - 1)
                eventually(partial(left, each), lambda seconds: seconds > IDLE_LEASE - 1)
        assert num_there(servers) == [1, 1, 1]
        model.apply_grad(gradient(4 if call == "push_pull" else 3))
        if call == "read_average":
            model.take_grad(2)
        average = waiting.result(PATIENCE_SECONDS)
    for name, values in gradient(2).items():
        if name != "table":
            same(average[name], values)


def test_a_part_that_ends_meanwhile_does_not_end_the_call(
    client: gradserve.Client, servers: Sequence[AgingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "USES_PER_LEASE", 3000)
    model = make(client)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(model.take_grad, 1)
        eventually(lambda: left(servers[0]) == IDLE_LEASE)
        key = ResourceKey(DEFAULT_CONTAINER, model.name)
        for each in servers[1:]:
            assert each.inspect(lambda server: server.registry.delete(key))
        model.apply_grad(gradient(1))
        same(waiting.result(PATIENCE_SECONDS)["bias"], gradient(1)["bias"])


def test_a_call_waits_for_parameters(
    client: gradserve.Client, servers: Sequence[AgingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "USES_PER_LEASE", 3000)
    ones = {"w": np.ones((6, 2), np.float32)}
    parameters = client.parameters(ones, name_at(0, 3), num_required=2, idle_lease=IDLE_LEASE, sharded=True)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(parameters.push_pull, ones, 0, worker_id="a")
        eventually(lambda: parameters.info().num_waiting == 1)
        for _ in range(4):
            for each in servers:
                pass_time(each, IDLE_LEASE - 1)
                eventually(partial(left, each), lambda seconds: seconds > IDLE_LEASE - 1)
        parameters.push(ones, 0, worker_id="b")
        same(waiting.result(PATIENCE_SECONDS).version["w"], 2 * ones["w"])
    for each in servers:
        pass_time(each, IDLE_LEASE + 1)
    assert not client.list_parameters()


def left(server: AgingServer) -> float:
    """Returns in how many seconds the accumulator of a server ends unless somebody uses it."""

    def look(running: Server) -> float:
        now = server.clock()
        return max(lease.end(now) - now for _, _, lease in running.lifetimes._queue._heap)

    return server.inspect(look)
