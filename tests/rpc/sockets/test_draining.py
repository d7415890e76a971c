"""A server with sockets stops: no connection ends without a word."""

import contextlib

import grpc
import numpy as np
import pytest

from gradserve_protocol.frames import FrameKind
from gradserve_protocol.tensors import Contents
from gradserve_protocol.v1 import accumulator_messages_pb2, accumulator_pb2, tensor_messages_pb2, tensor_pb2
from gradserve_server.app import Server
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.rpc.sockets.conftest import MIB, bulk_over_tls, connector, use_of
from tests.rpc.sockets.test_broken_rules import Info, answers, call_frame
from tests.servers.certificates import Certificates
from tests.servers.frames import FrameClient, issue_ticket
from tests.servers.polling import eventually
from tests.servers.raw_calls import RawCalls
from tests.servers.runtime import NOT_WARMED_UP

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
CONFIG = ServerConfig(runtime=NOT_WARMED_UP)


def begin_to_stop(local: LocalServer) -> None:
    assert local._stop is not None
    local.inspect(lambda _: local._stop.set())  # type: ignore[union-attr]


def test_a_server_may_end_before_its_block() -> None:
    with LocalServer(CONFIG) as local:
        begin_to_stop(local)
        local._thread.join()


def is_told(client: FrameClient) -> bool:
    """Returns True if the server says that it stops, and closes the connection."""
    frame = client.receive()
    said = (frame.header.kind, frame.header.code, frame.status.message)
    expected = (FrameKind.REPLY, UNAVAILABLE.value[0], "the server is shutting down")
    return said == expected and client.is_closed_by_server()


each_way = pytest.mark.parametrize("way", ["bulk", "shared_memory"])


@each_way
def test_idle_connections_are_told(way: str) -> None:
    with LocalServer(CONFIG) as local:
        connect = connector(local, way)
        with connect() as client, connect() as quiet, connect(hello=False) as unknown:
            assert answers(client)
            begin_to_stop(local)
            assert all(is_told(each) for each in (client, quiet, unknown))


def test_idle_connections_with_tls_are_told(certificates: Certificates) -> None:
    with LocalServer(CONFIG) as local, bulk_over_tls(local, certificates) as connect:
        before = use_of(local).connections
        with connect() as client, FrameClient.over_tcp(issue_ticket(local.address)) as silent:
            assert answers(client)
            eventually(lambda: use_of(local).connections, (before + 2).__eq__)
            begin_to_stop(local)
            assert is_told(client)
            assert silent.is_closed_by_server()  # it could not read what is not encrypted


@each_way
def test_a_call_that_crosses_the_end_of_its_connection_is_answered(way: str) -> None:
    with LocalServer(CONFIG) as local:
        client = connector(local, way)()
    with client:
        contents = Contents()
        request = tensor_messages_pb2.StoreTensorsRequest(tensors=contents.tensors([np.zeros(MIB, np.uint8)]))
        with contextlib.suppress(ConnectionError):  # the server has closed the connection
            client.call("TensorService.StoreTensors", request, contents)
        assert is_told(client)


@each_way
@pytest.mark.parametrize("num_bytes", [10, 50, 1000, MIB])
def test_half_a_call_is_answered_when_the_drain_time_is_over(way: str, num_bytes: int) -> None:
    runtime = NOT_WARMED_UP.model_copy(update={"drain_seconds": 0.0})
    with LocalServer(ServerConfig(runtime=runtime)) as local, connector(local, way)() as client:
        rest = bytes(2 * MIB)
        name = b"gradserve.v1.TensorService.StoreTensors"
        frame = call_frame(name, rest, message_bytes=99, payload_bytes=len(rest) - 99)
        client.sock.sendall(frame[:num_bytes])
        if num_bytes > 100:
            eventually(lambda: use_of(local).in_flight)
        begin_to_stop(local)
        assert is_told(client)


@each_way
def test_who_is_not_accepted_yet_is_told(way: str) -> None:
    with LocalServer(CONFIG) as local:
        ticket = issue_ticket(local.address)

        def connect_and_stop(_: Server) -> FrameClient:
            client = FrameClient.over_tcp(ticket) if way == "bulk" else FrameClient.over_unix(ticket)
            assert local._stop is not None
            local._stop.set()
            return client

        with local.inspect(connect_and_stop) as client:
            with contextlib.suppress(ConnectionError):
                client.sock.sendall(b"half a hello")
            assert is_told(client)


@each_way
def test_calls_under_way_are_answered_and_nothing_waits_for_the_drain_time(way: str) -> None:
    with LocalServer(CONFIG) as local, RawCalls(local.address) as raw:
        reference = accumulator_pb2.AccumulatorRef(name="a")
        spec = accumulator_pb2.AccumulatorSpec(
            components=[accumulator_pb2.ComponentSpec(dtype=tensor_pb2.DATA_TYPE_FLOAT32)]
        )
        raw.call(
            "CreateAccumulator", accumulator_messages_pb2.CreateAccumulatorRequest(accumulator=reference, spec=spec)
        )
        with connector(local, way)() as client:
            take = accumulator_messages_pb2.TakeGradientRequest(accumulator=reference, num_required=1)
            client.call("AccumulatorService.TakeGradient", take)
            eventually(lambda: local.inspect(lambda each: each.registry.factory.waiters.used), (1).__eq__)
            begin_to_stop(local)
            frame = client.receive()
            assert frame.header.code == UNAVAILABLE.value[0]
            assert is_told(client), "it expects no further call"


@each_way
def test_nothing_is_admitted_any_more(way: str) -> None:
    with LocalServer(CONFIG) as local:
        connect = connector(local, way)
        with connect() as client:
            local.inspect(lambda each: each.services.admission.close())
            client.call("ServerService.GetServerInfo", Info())
            frame = client.receive()
            assert (frame.header.code, frame.status.message) == (UNAVAILABLE.value[0], "the server is shutting down")
            assert is_told(client), "a call may be on its way"


@each_way
def test_who_comes_with_a_ticket_then_is_refused(way: str) -> None:
    with LocalServer(CONFIG) as local:
        ticket = issue_ticket(local.address).ticket
        with connector(local, way)(hello=False) as client:
            local.inspect(lambda each: each.services.admission.close())
            assert client.hello(ticket).header.code == UNAVAILABLE.value[0]
            assert client.is_closed_by_server()
