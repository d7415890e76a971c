"""A client's memory is its own again when its call is answered, or the connection has ended: nothing reads it then."""

import socket
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_protocol.frames import Segment
from gradserve_protocol.tensors import Contents
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import accumulator_pb2, tensor_messages_pb2
from gradserve_server.app import Server
from gradserve_server.observe.calls import MethodCalls
from gradserve_testing import LocalServer
from tests.rpc.sharding.raw_shards import OTHER, ROWS, gradient, request_id, running
from tests.rpc.sockets.conftest import Connect, connector
from tests.rpc.sockets.test_regions import PAGE, beside, make_accumulator, take, with_region
from tests.servers.frames import FrameClient
from tests.servers.holding import Hold, suspended
from tests.servers.polling import eventually, readable
from tests.servers.raw_calls import RawCalls

DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED
SIZE = PAGE // 4
OWN, LATER = 1.0, 100.0
"""What a client sends, and what is in its memory when that is its own again."""

each_kind = pytest.mark.parametrize(
    "fields",
    [{}, {"deterministic": True}, {"refuse_non_finite": True}],
    ids=["added in place", "held", "checked"],
)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Hold:
    return Hold(monkeypatch)


@dataclass(frozen=True)
class Lending:
    """A client that lends a page of its memory for a call."""

    client: FrameClient
    memory: NDArray[np.float32]

    def send(self, request: Any, seconds: float = 0) -> None:
        method = f"{SERVICES[type(request)]}.{type(request).__name__.removesuffix('Request')}"
        self.client.call(method, request, segments=[Segment(0, PAGE, 1, 0)], seconds=seconds)

    def give_up(self) -> None:
        self.client.sock.shutdown(socket.SHUT_WR)
        self.memory[:] = LATER

    def is_answered(self) -> bool:
        return bool(readable(self.client.sock, seconds=0))


SERVICES = {
    messages_pb2.ApplyGradientRequest: "AccumulatorService",
    messages_pb2.StageGradientRequest: "AccumulatorService",
    tensor_messages_pb2.StoreTensorsRequest: "TensorService",
}


def lending(client: FrameClient) -> Lending:
    memory = np.frombuffer(with_region(client), np.float32)
    memory[:] = OWN
    return Lending(client, memory)


def applying(reference: accumulator_pb2.AccumulatorRef) -> messages_pb2.ApplyGradientRequest:
    part = accumulator_pb2.ComponentGradient(dense=beside(np.float32, [SIZE], 0))
    return messages_pb2.ApplyGradientRequest(
        accumulator=reference, gradient=[part], request_id=request_id(7), worker_id="w"
    )


def num_accumulated(raw: RawCalls, reference: accumulator_pb2.AccumulatorRef) -> int:
    request = messages_pb2.GetNumAccumulatedRequest(accumulator=reference)
    return int(raw.call("GetNumAccumulated", request).num_accumulated)


def applies(local: LocalServer) -> MethodCalls:
    def look(server: Server) -> MethodCalls:
        return server.services.observed._calls.of("gradserve.v1.AccumulatorService", "ApplyGradient", "unary")

    return local.inspect(look)


def average(raw: RawCalls, reference: accumulator_pb2.AccumulatorRef) -> set[float]:
    return set(np.frombuffer(take(raw, reference, 1).dense.content, np.float32))


@each_kind
def test_no_error_is_answered_while_memory_may_be_read(
    connect_unix: Connect, server: LocalServer, raw: RawCalls, name: str, hold: Hold, fields: dict[str, bool]
) -> None:
    reference = make_accumulator(raw, name, sparse=False, **fields)
    ended = applies(server).handled.get(DEADLINE.name, 0)
    with connect_unix() as client:
        lent = lending(client)
        with hold.closed():
            lent.send(applying(reference), seconds=1e-6)
            eventually(lambda: applies(server).handled.get(DEADLINE.name, 0), (ended + 1).__eq__)
            assert hold.num_held == 1
            assert not lent.is_answered()
        assert client.receive().header.code == DEADLINE.value[0]
        lent.memory[:] = LATER
    assert average(raw, reference) == {OWN}


def test_the_next_call_does_not_wait_for_the_payload_of_one_that_has_ended(
    connect: Connect, raw: RawCalls, name: str, hold: Hold
) -> None:
    reference = make_accumulator(raw, name, sparse=False, size=1 << 15)
    contents = Contents()
    (tensor,) = contents.tensors([np.full(1 << 15, OWN, np.float32)])
    brought = messages_pb2.ApplyGradientRequest(
        accumulator=reference, gradient=[accumulator_pb2.ComponentGradient(dense=tensor)]
    )
    with connect(num_bytes=contents.num_bytes) as client, hold.closed():
        client.call("AccumulatorService.ApplyGradient", brought, contents, seconds=1e-6)
        assert client.receive().header.code == DEADLINE.value[0]
        assert hold.num_held == 1
        client.call("TensorService.ListTensors", tensor_messages_pb2.ListTensorsRequest())
        assert client.receive().header.code == 0
    assert average(raw, reference) == {OWN}


@each_kind
def test_a_gradient_that_was_given_up_before_it_was_read_does_not_count(
    connect_unix: Connect, raw: RawCalls, name: str, hold: Hold, fields: dict[str, bool]
) -> None:
    reference = make_accumulator(raw, name, sparse=False, **fields)
    with connect_unix() as client:
        lent = lending(client)
        with hold.closed():
            lent.send(applying(reference))
            hold.wait_until_held()
            lent.give_up()
        assert client.is_closed_by_server()
    assert num_accumulated(raw, reference) == 0


@each_kind
def test_a_suspended_server_does_not_carry_out_what_was_given_up(
    connect_unix: Connect, server: LocalServer, raw: RawCalls, name: str, fields: dict[str, bool]
) -> None:
    reference = make_accumulator(raw, name, sparse=False, **fields)
    with connect_unix() as client:
        lent = lending(client)
        with suspended(server):
            lent.send(applying(reference))
            lent.give_up()
        eventually(lent.is_answered)
    assert num_accumulated(raw, reference) == 0


def test_copies_that_were_made_too_late_are_of_no_use(connect_unix: Connect, server: LocalServer) -> None:
    request = tensor_messages_pb2.StoreTensorsRequest(tensors=[beside(np.float32, [SIZE], 0)])
    with connect_unix() as client:
        lent = lending(client)
        with suspended(server):
            lent.send(request)
            lent.give_up()
        assert client.receive().header.code == grpc.StatusCode.ABORTED.value[0]
    assert server.inspect(lambda each: len(each.store)) == 0


def test_a_repeated_call_brings_its_gradient_again(
    connect_unix: Connect, server: LocalServer, raw: RawCalls, name: str, hold: Hold
) -> None:
    reference = make_accumulator(raw, name, sparse=False)
    started = applies(server).started
    with connect_unix() as first, connect_unix() as second:
        lost, kept = lending(first), lending(second)
        with hold.closed():
            lost.send(applying(reference))
            hold.wait_until_held()
            kept.send(applying(reference))
            eventually(lambda: applies(server).started, (started + 2).__eq__)
            lost.give_up()
        answer, _ = second.answer(messages_pb2.ApplyGradientResponse)
    assert not answer.duplicate
    assert average(raw, reference) == {OWN}


@pytest.mark.parametrize("can_stage_again", [False, True], ids=["held", "added to others"])
def test_what_was_given_up_is_not_staged(hold: Hold, can_stage_again: bool) -> None:
    values = gradient(1)
    part = accumulator_pb2.ComponentGradient(name="w", dense=beside(np.float32, [ROWS[OTHER], 2], 0))
    with running() as shards:
        shards.create()
        with connector(shards.servers[OTHER], "shared_memory")() as client:
            lent = lending(client)
            with hold.closed():
                lent.send(shards.staging(OTHER, 1, values, gradient=[part], can_stage_again=can_stage_again))
                hold.wait_until_held()
                lent.give_up()
            assert client.is_closed_by_server()
        assert shards.stage(1, values) == [False, False]
        shards.apply(1)
        np.testing.assert_array_equal(shards.reduce(shards.take(1)), values)
