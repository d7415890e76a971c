"""Rounds that expect all live workers: one that computes for long is alive, one that has gone is not."""

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

import gradserve
from gradserve_server.config import ServerConfig
from tests.resources.clients.aging_server import CLIENT_LEASE, AgingServer, num_held, pass_time
from tests.servers.polling import eventually
from tests.servers.runtime import NOT_WARMED_UP
from tests.trees.servers import aggregator

LONG = 100 * CLIENT_LEASE
DELTA = {"w": np.ones(2, np.float32)}


@pytest.fixture
def server() -> Iterator[AgingServer]:
    with AgingServer(ServerConfig(runtime=NOT_WARMED_UP)) as local:
        yield local


@pytest.fixture(params=["at the server", "behind an aggregator"])
def address(request: pytest.FixtureRequest, server: AgingServer) -> Iterator[str]:
    """The address at which the worker that computes for long is connected."""
    with ExitStack() as stack:
        behind = "aggregator" in request.param
        yield stack.enter_context(aggregator(server.address, workers=1)).address if behind else server.address


def test_a_worker_that_computes_for_long_is_waited_for_until_it_goes(server: AgingServer, address: str) -> None:
    with gradserve.connect(server.address) as client:
        values = {"w": np.zeros(2, np.float32)}
        parameters = client.parameters(values, "w", num_required=2, grace=0.01, expected="alive")
        with gradserve.connect(address) as other:
            slow = other.parameters(shared_name="w")
            for step in range(2):
                slow.push(DELTA, step, worker_id="slow")
                parameters.push(DELTA, step, worker_id="quick")
                parameters.change(grace=4 * LONG)
                parameters.wait(step + 1)
            eventually(lambda: num_held(server) == 2)
            pass_time(server, LONG)
            for worker_id in ("quick", "new"):
                parameters.push(DELTA, 2, worker_id=worker_id)
            assert parameters.info().step == 2, "the slow one is there, and silent"
        eventually(lambda: num_held(server) == 1)
        pass_time(server, CLIENT_LEASE)  # in which it was last heard of
        parameters.push(DELTA, 2, worker_id="newest")
        assert parameters.info().step == 3
        assert [each.reason for each in parameters.rounds()] == ["grace", "expected", "expected"]
