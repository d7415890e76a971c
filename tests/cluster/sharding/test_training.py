"""Training runs whose gradients are sharded do what those on one server do."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

import gradserve
from gradserve.calls.accumulators.sharding import wire
from gradserve_server.config.servers import ClusterConfig
from tests.cluster.servers import addresses_of, name_at, running_cluster
from tests.cluster.sharding.clients import all_sharded
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.restarting import RestartingServer
from tests.training.replicas import Replica, have_equal_weights
from tests.training.test_rounds import *  # noqa: F403  all of them, with the client of this module


@pytest.fixture(scope="module")
def addresses() -> Iterator[list[str]]:
    with running_cluster(2) as servers:
        yield addresses_of(servers)


@pytest.fixture
def client(addresses: list[str]) -> Iterator[gradserve.Client]:
    with all_sharded(), gradserve.connect(addresses, timeout=PATIENCE_SECONDS) as connected:
        yield connected


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RestartingServer]]:
    """Two servers without state directories."""
    monkeypatch.setenv("GRADSERVE_RESTART_PATIENCE", str(PATIENCE_SECONDS))
    with ExitStack() as stack, all_sharded():
        places = [ClusterConfig(cluster="train", cluster_size=2, cluster_index=index) for index in range(2)]
        yield [stack.enter_context(RestartingServer(None, place)) for place in places]


def test_the_gradients_of_a_run_are_sharded_and_states_are_whole(client: gradserve.Client, name: str) -> None:
    with Replica(client, name, "first", 1).begin() as first:
        first.train()
        shards = {
            info.name.removeprefix(name): info.num_shards
            for info in client.list_accumulators()
            if info.name.startswith(name)
        }
    assert shards[""] == 2
    assert {count for purpose, count in shards.items() if purpose} == {0}


def test_workers_go_on_after_a_server_has_forgotten_its_part(servers: list[RestartingServer]) -> None:
    name = name_at(0, 2)
    with (
        gradserve.connect([each.address for each in servers]) as client,
        ThreadPoolExecutor(2) as threads,
        Replica(client, name, "first", 2).begin() as first,
        Replica(client, name, "second", 2).begin() as second,
    ):
        for _ in range(3):
            waits = threads.submit(first.train)
            eventually(lambda: first.worker.accumulator.num_accumulated() == 1)
            servers[1].restart()
            assert not second.train().was_late
            assert not waits.result().was_late
            assert have_equal_weights(first, second)


def test_a_late_worker_whose_averages_are_lost_gets_a_state(
    servers: list[RestartingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "PATIENCE_SECONDS", 0.05)
    name = name_at(0, 2)
    with gradserve.connect([each.address for each in servers]) as client:
        late = Replica(client, name, "late", 1).begin()
        with Replica(client, name, "fast", 1).begin() as fast:
            for _ in range(3):
                fast.train()
        with gradserve.connect(servers[1].address) as one:
            assert one.delete_accumulator(name)  # the part that it has, as a restart would
        with late:
            advance = late.train()
            assert advance.was_late
            assert not advance.averages
            assert have_equal_weights(fast, late)
            assert not late.train().was_late
