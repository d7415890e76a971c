"""Rounds that expect all live workers: one that computes for long is alive, one that has gone is not."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import pytest

import gradserve
from tests.cluster.servers import addresses_of, name_at
from tests.resources.clients.aging_server import CLIENT_LEASE, AgingServer, aging_cluster, num_held, pass_time
from tests.servers.polling import eventually
from tests.trees.servers import aggregator

LONG = 100 * CLIENT_LEASE
DELTA = {"w": np.ones(2, np.float32)}


@pytest.fixture
def servers(request: pytest.FixtureRequest) -> Iterator[Sequence[AgingServer]]:
    """Servers of which the last is the home of the parameters."""
    with aging_cluster(request.param) as running:
        yield running


@pytest.fixture(params=["directly", "through an aggregator"])
def addresses(request: pytest.FixtureRequest, servers: Sequence[AgingServer]) -> Iterator[list[str]]:
    """The addresses at which the worker that computes for long is connected."""
    with ExitStack() as stack:
        there = addresses_of(servers)
        near = "aggregator" in request.param
        yield [stack.enter_context(aggregator(",".join(there), workers=1)).address] if near else there


@pytest.mark.parametrize(
    ("servers", "sharded"),
    [(1, False), (2, False), (2, True)],
    indirect=["servers"],
    ids=["one server", "the second of two", "shards of two"],
)
def test_a_worker_that_computes_for_long_is_waited_for_until_it_goes(
    servers: Sequence[AgingServer], addresses: list[str], sharded: bool
) -> None:
    home, name = servers[-1], name_at(len(servers) - 1, len(servers))
    with gradserve.connect(addresses_of(servers)) as client:
        parameters = client.parameters(
            {"w": np.zeros(2, np.float32)}, name, num_required=2, grace=0.01, expected="alive", sharded=sharded
        )
        with gradserve.connect(addresses) as other:
            slow = other.parameters(shared_name=name)
            for step in range(2):
                slow.push(DELTA, step, worker_id="slow")
                parameters.push(DELTA, step, worker_id="quick")
                parameters.change(grace=4 * LONG)
                parameters.wait(step + 1)
            eventually(lambda: num_held(home) == 2)
            pass_time(home, LONG)
            for worker_id in ("quick", "new"):
                parameters.push(DELTA, 2, worker_id=worker_id)
            assert parameters.info().step == 2, "the slow one is there, and silent"
        eventually(lambda: num_held(home) == 1)
        pass_time(home, CLIENT_LEASE)  # in which it was last heard of
        parameters.push(DELTA, 2, worker_id="newest")
        assert parameters.info().step == 3
        assert [each.reason for each in parameters.rounds()] == ["grace", "expected", "expected"]
