"""A client over a transport that is handed in: it asks that for everything, and no server."""

from typing import Any

import pytest

import gradserve
import gradserve.aio
from gradserve.calls.client import ClientCalls
from gradserve.calls.combinators import together
from gradserve.calls.exchange import Background, Exchange, Operation, TimeLimits, Unary
from gradserve.calls.identity import RequestIds
from gradserve_protocol.v1 import accumulator_messages_pb2, lease_messages_pb2, server_messages_pb2
from tests.client.fake_transport import FakeAsyncTransport, FakeTransport
from tests.servers.connecting import aio_client_over, client_over


class Server:
    """Answers what these tests ask for.

    Attributes:
        asked: The names of the methods.
        waits: For how long each of them lets the server wait.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.waits: list[float] = []

    def answer(self, exchange: Exchange) -> Any:
        if isinstance(exchange, Background):
            return None
        assert isinstance(exchange, Unary)
        self.asked.append(exchange.method)
        self.waits.append(exchange.wait)
        return getattr(self, f"_{exchange.method}")()

    def _GetServerInfo(self) -> Any:  # noqa: N802
        return server_messages_pb2.GetServerInfoResponse(version="of nobody")

    def _CreateAccumulator(self) -> Any:  # noqa: N802
        return accumulator_messages_pb2.CreateAccumulatorResponse()

    def _TakeGradient(self) -> Any:  # noqa: N802
        raise gradserve.AbortedError("nothing to take")

    def _EndClientLease(self) -> Any:  # noqa: N802
        return lease_messages_pb2.EndClientLeaseResponse()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def calls() -> ClientCalls:
    return ClientCalls(RequestIds("me"), TimeLimits(7))


def test_a_client(server: Server, calls: ClientCalls) -> None:
    transport = FakeTransport(server.answer)
    with client_over(transport, "nowhere:1", calls) as client:
        assert client.address == "nowhere:1"
        assert repr(client) == "<gradserve.Client nowhere:1>"
        assert client.server_info().version == "of nobody"
        accumulator = client.conditional_accumulator("float32")
        with pytest.raises(gradserve.AbortedError, match="nothing to take"):
            accumulator.take_grad(1)
        assert server.asked == ["GetServerInfo", "CreateAccumulator", "TakeGradient"]
    assert transport.is_closed
    assert server.asked == ["GetServerInfo", "CreateAccumulator", "TakeGradient", "EndClientLease"]
    assert server.waits == [0, 0, 7, 0]


async def test_a_client_aio(server: Server, calls: ClientCalls) -> None:
    transport = FakeAsyncTransport(server.answer)
    async with aio_client_over(transport, "nowhere:1", calls) as client:
        assert repr(client) == "<gradserve.aio.Client nowhere:1>"
        assert (await client.server_info()).version == "of nobody"
        accumulator = await client.conditional_accumulator("float32")
        with pytest.raises(gradserve.AbortedError, match="nothing to take"):
            await accumulator.take_grad(1)
    assert transport.is_closed
    assert server.asked == ["GetServerInfo", "CreateAccumulator", "TakeGradient", "EndClientLease"]
    assert server.waits == [0, 0, 7, 0]


def test_operations_together(server: Server) -> None:
    def asking() -> Operation[str]:
        reply = yield Unary("ServerService", "GetServerInfo", server_messages_pb2.GetServerInfoRequest())
        return str(reply.version)

    assert FakeTransport(server.answer).run(together(asking(), asking())) == ["of nobody"] * 2
