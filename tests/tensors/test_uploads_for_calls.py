"""A large gradient over gRPC is uploaded before its call: until the call has used it, it counts as arriving."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from pydantic import ByteSize

import gradserve
from gradserve.interceptors import PUT_TENSORS, Around, CallInfo
from gradserve_server.config import LimitsConfig, ServerConfig
from gradserve_server.tensors import payload
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.runtime import NOT_WARMED_UP

GRADIENT = np.ones(1_250_000, np.float32)
ROOM = ByteSize(8_000_000)
"""There is room for one gradient at a time."""


class BetweenUploadAndCall(gradserve.Interceptor):
    """Stops each call that comes after an upload."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self._has_uploaded = False

    def around_call(self, call: CallInfo) -> Around:
        if self._has_uploaded and call.method != PUT_TENSORS:
            self.reached.set()
            assert self.go_on.wait(PATIENCE_SECONDS)
        yield None
        self._has_uploaded = self._has_uploaded or call.method == PUT_TENSORS


@pytest.fixture
def server() -> Iterator[LocalServer]:
    limits = LimitsConfig(max_inflight_bytes=ROOM)
    with LocalServer(ServerConfig(limits=limits, runtime=NOT_WARMED_UP)) as local:
        yield local


def arriving(server: LocalServer) -> tuple[int, int]:
    """Returns the bytes that count as arriving, and the number of uploads that wait for room."""

    def look(each: Any) -> tuple[int, int]:
        in_flight = each.sockets.context.in_flight
        return in_flight.used, in_flight.num_waiting

    return server.inspect(look)


def connect(server: LocalServer, *interceptors: gradserve.Interceptor) -> gradserve.Client:
    return gradserve.connect(server.address, timeout=PATIENCE_SECONDS, transport="grpc", interceptors=interceptors)


def send(client: gradserve.Client, call: str) -> None:
    """Sends a gradient, or an update of parameters."""
    if call == "push":
        client.parameters({"w": np.zeros_like(GRADIENT)}, shared_name="model").push({"w": GRADIENT}, local_step=0)
    else:
        client.gradient_accumulator({"w": GRADIENT}, shared_name="sum").apply_grad({"w": GRADIENT}, local_step=0)


@pytest.mark.parametrize("call", ["apply_grad", "push"])
def test_the_next_upload_waits_until_a_call_has_used_the_one_before(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(payload, "USE_SECONDS", PATIENCE_SECONDS)
    between = BetweenUploadAndCall()
    with connect(server, between) as first, connect(server) as second, ThreadPoolExecutor() as threads:
        if call == "push":  # the values of parameters are uploaded, too
            send(second, call)
        sent = threads.submit(send, first, call)
        assert between.reached.wait(PATIENCE_SECONDS)
        assert arriving(server) == (GRADIENT.nbytes, 0), "it has arrived, and nobody has used it"
        also = threads.submit(send, second, call)
        eventually(lambda: arriving(server), (GRADIENT.nbytes, 1).__eq__)
        between.go_on.set()
        sent.result()
        also.result()
    assert arriving(server) == (0, 0)


def test_an_upload_whose_call_does_not_come_makes_room(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "USE_SECONDS", 0.0)
    between = BetweenUploadAndCall()
    with connect(server, between) as first, connect(server) as second, ThreadPoolExecutor() as threads:
        sent = threads.submit(send, first, "apply_grad")
        assert between.reached.wait(PATIENCE_SECONDS)
        send(second, "apply_grad")
        between.go_on.set()
        sent.result()


def test_a_failed_call_makes_room(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "USE_SECONDS", PATIENCE_SECONDS)
    with connect(server) as client:
        accumulator = client.gradient_accumulator({"w": np.zeros(3, np.float32)}, shared_name="small")
        with pytest.raises(gradserve.InvalidArgumentError):
            accumulator.apply_grad({"w": GRADIENT}, local_step=0)
        assert arriving(server) == (0, 0)


def test_what_is_put_to_stay_does_not_count(server: LocalServer) -> None:
    with connect(server) as client:
        handle = client.put(GRADIENT)
        assert arriving(server) == (0, 0)
        np.testing.assert_array_equal(client.get(handle), GRADIENT)
