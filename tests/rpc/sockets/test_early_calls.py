"""Gradients that are checked while they arrive."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from gradserve_protocol.tensors import Contents
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_pb2
from gradserve_server.accumulators import incoming as arriving
from gradserve_server.devices.host.reduction import Reducer
from gradserve_testing import LocalServer
from tests.rpc.sockets.conftest import MIB, Connect
from tests.servers.frames import FrameClient
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.raw_calls import RawCalls

NUM_FLOATS = 6 * MIB // 4
"""More than the server waits for before it begins a call."""
PART = arriving._PART_BYTES // 4
STRICT = accumulator_pb2.AccumulatorRef(name="strict")


@pytest.fixture(autouse=True)
def accumulator(raw: RawCalls, unused: None) -> Iterator[None]:
    """An accumulator that refuses values that are not finite."""
    component = accumulator_pb2.ComponentSpec(
        dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=accumulator_pb2.PartialShape(unknown_rank=True)
    )
    spec = accumulator_pb2.AccumulatorSpec(components=[component], refuse_non_finite=True)
    raw.call("CreateAccumulator", messages_pb2.CreateAccumulatorRequest(accumulator=STRICT, spec=spec))
    yield
    raw.call("DeleteAccumulator", messages_pb2.DeleteAccumulatorRequest(accumulator=STRICT))


def gradient(values: Any, ref: accumulator_pb2.AccumulatorRef = STRICT) -> tuple[Any, Contents]:
    contents = Contents()
    (tensor,) = contents.tensors([values])
    return messages_pb2.ApplyGradientRequest(
        accumulator=ref, gradient=[accumulator_pb2.ComponentGradient(dense=tensor)]
    ), contents


def num_accumulated(client: FrameClient) -> int:
    client.call("AccumulatorService.GetNumAccumulated", messages_pb2.GetNumAccumulatedRequest(accumulator=STRICT))
    reply = client.receive()
    assert reply.header.code == 0
    return messages_pb2.GetNumAccumulatedResponse.FromString(reply.message).num_accumulated


class Checks:
    """Records which values are looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.begun = threading.Event()
        original = Reducer.first_non_finite

        def note(reducer: Reducer, arrays: Sequence[Any]) -> Any:
            self.sizes += [array.size for array in arrays]
            self.begun.set()
            return original(reducer, arrays)

        monkeypatch.setattr(Reducer, "first_non_finite", note)


def test_what_is_there_is_checked_once_before_the_rest_comes(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Checks(monkeypatch)
    request, contents = gradient(np.ones(NUM_FLOATS, np.float32))
    with connect(num_bytes=8 * MIB) as client, connect() as other:
        client.call("AccumulatorService.ApplyGradient", request, contents, hold_back=100)
        assert checks.begun.wait(PATIENCE_SECONDS)
        before = num_accumulated(other)
        client.send_rest()
        assert client.receive().header.code == 0
        assert num_accumulated(other) == before + 1
    assert checks.sizes == [PART, NUM_FLOATS - PART]


@pytest.mark.parametrize("position", [0, PART - 1, PART, NUM_FLOATS - 1])
def test_values_that_are_not_finite(connect: Connect, position: int) -> None:
    values = np.ones(NUM_FLOATS, np.float32)
    values[position] = np.nan
    with connect(num_bytes=8 * MIB) as client:
        before = num_accumulated(client)
        client.call("AccumulatorService.ApplyGradient", *gradient(values))
        reply = client.receive()
        assert reply.header.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert f"expected finite values, got nan at [{position}]" in reply.status.message
        assert num_accumulated(client) == before


def test_no_such_accumulator(connect: Connect) -> None:
    request = gradient(np.ones(NUM_FLOATS, np.float32), accumulator_pb2.AccumulatorRef(name="nothing"))
    with connect(num_bytes=8 * MIB) as client:
        client.call("AccumulatorService.ApplyGradient", *request)
        assert client.receive().header.code == grpc.StatusCode.NOT_FOUND.value[0]
        num_accumulated(client)


def test_its_client_leaves(connect: Connect, server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Checks(monkeypatch)
    with connect() as other:
        before = num_accumulated(other)
        with connect(num_bytes=8 * MIB) as client:
            request, contents = gradient(np.ones(NUM_FLOATS, np.float32))
            client.call("AccumulatorService.ApplyGradient", request, contents, hold_back=100)
            assert checks.begun.wait(PATIENCE_SECONDS)
        assert num_accumulated(other) == before
