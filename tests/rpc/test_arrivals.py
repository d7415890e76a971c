"""A server that drains: calls are kept until clients know that they have to go elsewhere, and then refused."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gradserve_protocol.v1 import server_messages_pb2, server_service_pb2_grpc
from gradserve_server.config import LimitsConfig
from gradserve_server.rpc.boundary.chain import Interceptor, Service
from gradserve_server.rpc.boundary.interceptors import Admission, Faults
from gradserve_server.rpc.health.service import HealthServicer
from gradserve_server.rpc.listeners.grpc.flow import Traffic
from gradserve_server.rpc.listeners.grpc.listener import Arrivals, make_handler
from gradserve_server.rpc.services import SERVICES
from tests.servers.polling import PATIENCE_SECONDS


class AnsweringServicer:
    """Answers every call."""

    def __getattr__(self, method: str) -> Any:
        return self._answer

    async def _answer(self, request: Any, call: Any) -> Any:
        return server_messages_pb2.GetServerInfoResponse(version="answered")


class Served:
    """A server behind an admission, and a client of it."""

    def __init__(self, admission: Admission, arrivals: Arrivals, channel: grpc.aio.Channel) -> None:
        self.admission = admission
        self.arrivals = arrivals
        self._info: Any = server_service_pb2_grpc.ServerServiceStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)

    def call(self) -> Any:
        return self._info.GetServerInfo(server_messages_pb2.GetServerInfoRequest())

    async def probe(self) -> None:
        await self.health()

    async def health(self) -> int:
        status: int = (await self._health.Check(health_pb2.HealthCheckRequest())).status
        return status


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    admission = Admission()
    arrivals = Arrivals(admission)
    server = grpc.aio.server(interceptors=(arrivals,))
    chain: tuple[Interceptor, ...] = (Faults(), admission)
    traffic = Traffic.within(LimitsConfig())
    server.add_generic_rpc_handlers(
        [make_handler(Service(each, AnsweringServicer(), chain), traffic) for each in SERVICES]
    )
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer([]), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=(("grpc.enable_retries", 0),)) as channel:
        yield Served(admission, arrivals, channel)
    await server.stop(None)


@asynccontextmanager
async def arriving(served: Served) -> AsyncIterator[None]:
    """Calls arrive one after the other, each soon after the last."""

    async def arrive() -> None:
        while True:
            await served.health()

    task = asyncio.create_task(arrive())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def refused(call: Awaitable[Any]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await asyncio.wait_for(call, PATIENCE_SECONDS)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert raised.value.details() == "the server is shutting down"


async def test_calls_are_let_in_until_then(served: Served) -> None:
    assert (await served.call()).version == "answered"


async def test_calls_are_kept_until_clients_were_told_and_health_is_not(served: Served) -> None:
    served.admission.close()
    early = [served.call() for _ in range(3)]
    # An answer on the same connection: by now the calls before it have arrived.
    assert await served.health() == health_pb2.HealthCheckResponse.SERVING
    await served.arrivals.settle(served.probe)
    assert not any(call.done() for call in early)
    served.arrivals.refuse()
    for call in (*early, served.call()):
        await refused(call)


async def test_a_kept_call_can_be_given_up(served: Served) -> None:
    served.admission.close()
    given_up, kept = served.call(), served.call()
    await served.health()
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    served.arrivals.refuse()
    await refused(kept)


async def test_a_server_that_nobody_calls_settles_at_once(served: Served) -> None:
    settling = asyncio.ensure_future(served.arrivals.settle(served.probe))
    await asyncio.sleep(0)
    assert settling.done()


async def test_calls_that_keep_coming_do_not_hold_up_the_stop(served: Served) -> None:
    async with arriving(served):
        await asyncio.wait_for(served.arrivals.settle(served.probe), PATIENCE_SECONDS)


async def test_a_call_that_just_came_is_followed_by_a_quiet_moment(served: Served) -> None:
    await served.health()
    settling = asyncio.ensure_future(served.arrivals.settle(served.probe))
    await asyncio.sleep(0)
    assert not settling.done()
    await asyncio.wait_for(settling, PATIENCE_SECONDS)


async def test_calls_that_came_before_the_end_are_taken(served: Served) -> None:
    """However long gRPC keeps them: the server ends with a call of its own, behind them."""
    await served.health()
    served.admission.close()
    kept: list[Any] = []

    async def probe() -> None:
        kept.extend(served.call() for _ in range(50))
        await served.health()

    await served.arrivals.settle(probe)
    served.arrivals.refuse()
    for call in kept:
        await refused(call)
