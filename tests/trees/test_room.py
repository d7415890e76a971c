"""Gradients that wait at an aggregator for others leave these the room to arrive."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pydantic import ByteSize

import gradserve
from gradserve_server.config import LimitsConfig
from gradserve_server.tensors import payload
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS
from tests.trees.servers import aggregator
from tests.trees.workers import at_once, clients_of

GRADIENT = np.ones(1_250_000, np.float32)
ROOM = ByteSize(8_000_000)
"""One gradient may arrive at a time."""


@pytest.fixture(scope="module")
def near() -> Iterator[LocalServer]:
    with LocalServer() as top, aggregator(top.address, 2, limits=LimitsConfig(max_inflight_bytes=ROOM)) as server:
        yield server


def accumulator(client: gradserve.Client, name: str) -> Any:
    made = client.gradient_accumulator({"w": GRADIENT}, name)
    return lambda worker: made.push_pull({"w": GRADIENT}, 2, worker_id=worker, timeout=PATIENCE_SECONDS)["w"][0]


def parameters(client: gradserve.Client, name: str) -> Any:
    made = client.parameters({"w": np.zeros_like(GRADIENT)}, shared_name=name, num_required=2)
    return lambda worker: made.push_pull({"w": GRADIENT}, 0, worker_id=worker, timeout=PATIENCE_SECONDS).version["w"][0]


@pytest.mark.parametrize("kind", [accumulator, parameters])
@pytest.mark.parametrize("way", ["shared_memory", "bulk", "grpc"])
def test_the_gradients_of_a_round_need_no_room_beside_each_other(
    near: LocalServer, monkeypatch: pytest.MonkeyPatch, name: str, way: str, kind: Any
) -> None:
    monkeypatch.setattr(payload, "USE_SECONDS", 10 * PATIENCE_SECONDS)
    with clients_of(near.address, 2, transport=way) as clients:
        push_pulls = [kind(each, name) for each in clients]
        assert at_once(lambda push_pull, worker: push_pull(worker), push_pulls, "ab") == [1.0, 1.0]
    assert near.inspect(lambda server: server.sockets.context.in_flight.used) == 0
