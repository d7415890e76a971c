"""Who waits at an aggregator uses what all servers upstream have of an accumulator, so that none of it ends."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

import gradserve
from gradserve_server.rpc.upstream import sharded
from tests.cluster.servers import addresses_of, name_at
from tests.cluster.sharding.clients import MODEL, gradient, same, small_pieces
from tests.cluster.sharding.test_idle_leases import left
from tests.resources.clients.aging_server import AgingServer, aging_cluster, pass_time
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.trees.servers import aggregator

IDLE_LEASE = 30


@pytest.fixture
def servers() -> Iterator[Sequence[AgingServer]]:
    with aging_cluster(2) as running:
        yield running


@pytest.mark.parametrize("call", ["take_grad", "read_average", "push_pull"])
def test_a_call_waits(servers: Sequence[AgingServer], monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(sharded, "USES_PER_LEASE", 3000)  # every 10 ms, as the aggregator's time does not pass faster
    with (
        small_pieces(),
        aggregator(",".join(addresses_of(servers)), 1) as near,
        gradserve.connect(near.address) as client,
    ):
        model = client.gradient_accumulator(MODEL, name_at(0, 2), idle_lease=IDLE_LEASE, sharded=True)
        model.apply_grad(gradient(1))
        calls: Mapping[str, Callable[[], Any]] = {
            "take_grad": lambda: model.take_grad(2),
            "read_average": lambda: model.read_average(1),
            "push_pull": lambda: model.push_pull(gradient(1), 3),
        }
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(calls[call])
            eventually(partial(left, servers[0]), lambda seconds: seconds == IDLE_LEASE)
            for _ in range(3):
                for each in servers:
                    pass_time(each, IDLE_LEASE - 1)
                    eventually(partial(left, each), lambda seconds: seconds > IDLE_LEASE - 1)
            model.apply_grad(gradient(1))
            if call == "read_average":
                model.take_grad(2)
            same(waiting.result(PATIENCE_SECONDS)["kernel"], gradient(1)["kernel"])
