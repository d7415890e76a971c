"""A server with sockets stops."""

import grpc
import pytest

from gradserve.v1 import accumulator_messages_pb2, accumulator_pb2, tensor_pb2
from gradserve_server.config import ServerConfig
from gradserve_server.testing import LocalServer
from tests.rpc.sockets.conftest import connector
from tests.rpc.sockets.test_broken_rules import Info, answers
from tests.servers.frames import issue_ticket
from tests.servers.polling import eventually
from tests.servers.raw_calls import RawCalls
from tests.servers.runtime import NOT_WARMED_UP

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
CONFIG = ServerConfig(runtime=NOT_WARMED_UP)


def begin_to_stop(local: LocalServer) -> None:
    assert local._stop is not None
    local.inspect(lambda _: local._stop.set())  # type: ignore[union-attr]


each_way = pytest.mark.parametrize("way", ["bulk", "shared_memory"])


@each_way
def test_idle_connections_are_closed(way: str) -> None:
    with LocalServer(CONFIG) as local:
        connect = connector(local, way)
        with connect() as client, connect() as quiet, connect(hello=False) as unknown:
            assert answers(client)
            begin_to_stop(local)
            assert all(each.is_closed_by_server() for each in (client, quiet, unknown))


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
            eventually(lambda: local.inspect(lambda each: each.registry.waiters.used), (1).__eq__)
            begin_to_stop(local)
            frame = client.receive()
            assert frame.header.code == UNAVAILABLE.value[0]
            assert client.is_closed_by_server(), "it expects no further call"


@each_way
def test_nothing_is_admitted_any_more(way: str) -> None:
    with LocalServer(CONFIG) as local:
        connect = connector(local, way)
        with connect() as client:
            local.inspect(lambda each: each._services.admission.close())
            client.call("ServerService.GetServerInfo", Info())
            frame = client.receive()
            assert (frame.header.code, frame.status.message) == (UNAVAILABLE.value[0], "the server is shutting down")
            assert client.is_closed_by_server()


@each_way
def test_who_comes_with_a_ticket_then_is_refused(way: str) -> None:
    with LocalServer(CONFIG) as local:
        ticket = issue_ticket(local.address).ticket
        with connector(local, way)(hello=False) as client:
            local.inspect(lambda each: each._services.admission.close())
            assert client.hello(ticket).header.code == UNAVAILABLE.value[0]
            assert client.is_closed_by_server()
