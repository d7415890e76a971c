"""Sharded accumulators that one client deletes while another one makes them, through an aggregator or without one."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

import gradserve
from gradserve_server.config import ServerConfig
from gradserve_server.config.servers import ClusterConfig
from gradserve_server.parts import Parts
from gradserve_testing import LocalServer
from tests.cluster.servers import addresses_of, name_at
from tests.cluster.sharding.clients import MODEL, gradient, same, shards_of, small_pieces
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.runtime import NOT_WARMED_UP
from tests.trees.servers import aggregator
from tests.trees.sharding.stages import Gate

HOME, OTHER = 0, 1
NAME = name_at(HOME, 2)


class Cluster(NamedTuple):
    """Two servers.

    Attributes:
        servers: The servers.
        gate: Holds calls at the server that is not the home.
        client: A client, which is that of an aggregator or not.
        direct: Another client, of both servers.
    """

    servers: list[LocalServer]
    gate: Gate
    client: gradserve.Client
    direct: gradserve.Client


@pytest.fixture(params=["direct", "through an aggregator"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    gate = Gate()
    with ExitStack() as stack:
        stack.enter_context(small_pieces())
        servers = []
        for index, parts in ((HOME, None), (OTHER, Parts(interceptors=(gate,)))):
            place = ClusterConfig(cluster="train", cluster_size=2, cluster_index=index)
            servers.append(stack.enter_context(LocalServer(ServerConfig(runtime=NOT_WARMED_UP, cluster=place), parts)))
        addresses: Any = addresses_of(servers)
        direct = stack.enter_context(gradserve.connect(addresses))
        if request.param != "direct":
            addresses = stack.enter_context(aggregator(",".join(addresses), 1)).address
        yield Cluster(servers, gate, stack.enter_context(gradserve.connect(addresses)), direct)


def make(client: gradserve.Client) -> Any:
    return client.gradient_accumulator(MODEL, NAME, sharded=True)


def test_a_deletion_that_is_late_leaves_alone_what_was_made_after_it(cluster: Cluster) -> None:
    make(cluster.client)
    cluster.gate.close(["DeleteAccumulator"], 0)
    with ThreadPoolExecutor(1) as threads:
        deletion = threads.submit(cluster.client.delete_accumulator, NAME)
        assert cluster.gate.has_come.wait(PATIENCE_SECONDS)
        later = make(cluster.direct)
        later.apply_grad(gradient(1))
        cluster.gate.open()
        assert deletion.result(PATIENCE_SECONDS)
    same(later.take_grad(1)["kernel"], gradient(1)["kernel"])


def test_what_is_deleted_while_it_is_made_is_made_again(cluster: Cluster) -> None:
    """The home had it, and the other server hears of that when it was deleted."""
    cluster.gate.close(["CreateAccumulator"], 0)
    with ThreadPoolExecutor(1) as threads:
        creation = threads.submit(make, cluster.client)
        assert cluster.gate.has_come.wait(PATIENCE_SECONDS)
        assert cluster.direct.delete_accumulator(NAME)
        cluster.gate.open()
        made = creation.result(PATIENCE_SECONDS)
    assert shards_of(NAME, cluster.servers) == [True, True]
    same(made.push_pull(gradient(1), 1)["kernel"], gradient(1)["kernel"])


def test_an_accumulator_that_was_made_again_is_another_one(cluster: Cluster) -> None:
    """Whoever had the earlier one is told so, although the servers have one of this name."""
    earlier = make(cluster.client)
    cluster.direct.delete_accumulator(NAME)
    later = make(cluster.direct)
    with pytest.raises(gradserve.NotFoundError, match="was deleted; another one has this name now"):
        earlier.push_pull(gradient(1), 1)
    later.apply_grad(gradient(2))
    same(later.take_grad(1)["kernel"], gradient(2)["kernel"])
