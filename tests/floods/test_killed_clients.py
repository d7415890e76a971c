"""Clients that are killed amid a flood: what was private to them ends with their leases, as on a quiet server."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import grpc

from gradserve.testing import FaultyProxy
from gradserve_protocol.v1 import accumulator_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import lease_messages_pb2
from gradserve_server.config import LeaseConfig, ServerConfig
from tests.bad_input.layer_tables import create_request
from tests.bad_input.requests import Create, Take, component, ref, spec
from tests.resources.clients.aging_server import CLIENT_LEASE, AgingServer, num_held, num_private, pass_time
from tests.servers.polling import eventually
from tests.servers.raw_calls import RawCalls
from tests.servers.runtime import NOT_WARMED_UP

NUM_CLIENTS = 15


def begin(client: RawCalls, client_id: str) -> list[Any]:
    """Makes private accumulators and layers, waits for some, and begins to make more; returns the calls under way."""
    lifetime = {"owner_client_id": client_id}

    def creation(number: int) -> Create:
        return Create(accumulator=ref(f"{client_id}/{number}"), spec=spec(component()), lifetime=lifetime)

    for number in range(3):
        client.call("CreateAccumulator", creation(number))
        client.call("CreateBatchNormLayer", create_request(f"{client_id}/{number}", lifetime=lifetime))
    return [
        client.start("HoldClientLease", lease_messages_pb2.HoldClientLeaseRequest(client_id=client_id)),
        *(client.start("TakeGradient", Take(accumulator=ref(f"{client_id}/{n}"), num_required=1)) for n in range(2)),
        *(client.start("CreateAccumulator", creation(number)) for number in range(3, 8)),
    ]


@contextmanager
def flood(address: str) -> Iterator[None]:
    """Keeps the server busy with calls until the end of the block."""
    end = threading.Event()

    def call_again_and_again() -> None:
        with RawCalls(address) as calls:
            while not end.is_set():
                calls.call("ListAccumulators", messages_pb2.ListAccumulatorsRequest())

    thread = threading.Thread(target=call_again_and_again)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def test_nothing_of_theirs_stays() -> None:
    config = ServerConfig(runtime=NOT_WARMED_UP, leases=LeaseConfig(client_lease_seconds=CLIENT_LEASE))
    with AgingServer(config) as server, ExitStack() as clients:
        with flood(server.address):
            with FaultyProxy(server.address) as network:
                under_way = []
                for number in range(NUM_CLIENTS):
                    client = clients.enter_context(RawCalls(network.address))
                    under_way += begin(client, f"client {number}")
                assert num_private(server) >= NUM_CLIENTS * 6
            for call in under_way:
                with suppress(grpc.RpcError):
                    call.result()
            eventually(lambda: num_held(server) == 0)
            assert num_private(server) >= NUM_CLIENTS * 6
            eventually(lambda: server.inspect(lambda each: each.registry.factory.waiters.used) == 0)

            def left_after_a_lease() -> int:
                pass_time(server, CLIENT_LEASE)  # again, for calls that were still on their way
                return num_private(server)

            eventually(left_after_a_lease, lambda left: left == 0)
        assert server.inspect(lambda each: len(each.lifetimes.clients)) == 0
