"""A call that the server cancels, as one that stops does, is unavailable: only what the client cancels is cancelled."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.calls.retries import RetryPolicy
from gradserve_protocol.v1 import server_messages_pb2
from tests.servers.polling import PATIENCE_SECONDS

CANCELLED = "the server stopped, or something on the way to it ended the call: CANCELLED"
HANDLE = gradserve.TensorHandle("some", np.dtype(np.float32), (2,))
CALLS: dict[str, Callable[[Any], Any]] = {
    "unary": lambda client: client.server_info(),
    "upload": lambda client: client.put([1.0]),
    "download": lambda client: client.get(HANDLE),
    "last download": lambda client: client.get(HANDLE, release=True),
}


class Cancelling(grpc.GenericRpcHandler):
    """Cancels calls.

    Attributes:
        left: How many it cancels before it answers one.
        met: How many calls there were.
    """

    def __init__(self) -> None:
        self.left = 1 << 30
        self.met = 0
        self.address = ""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if handler_call_details.method.endswith("/DeleteTensors"):
            return None  # an upload without a reply gives back its receipt
        return grpc.stream_stream_rpc_method_handler(self._answer)

    async def _answer(self, requests: Any, context: Any) -> None:
        self.met += 1
        self.left -= 1
        if self.left >= 0:
            await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
        await context.write(server_messages_pb2.GetServerInfoResponse(version="1.2.3").SerializeToString())


@pytest.fixture
async def cancelling() -> AsyncIterator[Cancelling]:
    handler = Cancelling()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([handler])
    handler.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield handler
    await server.stop(None)


@pytest.mark.parametrize(("kind", "attempts"), [("unary", 5), ("upload", 5), ("download", 5), ("last download", 1)])
async def test_it_is_unavailable_after_some_attempts(cancelling: Cancelling, kind: str, attempts: int) -> None:
    assert len(RetryPolicy().pauses) + 1 == 5
    said = rf"^{CANCELLED} \[GS_CONNECTION_LOST\]$"
    with (
        gradserve.connect(cancelling.address, timeout=PATIENCE_SECONDS, transport="grpc") as client,
        pytest.raises(gradserve.UnavailableError, match=said),
    ):
        await asyncio.to_thread(CALLS[kind], client)
    assert cancelling.met == attempts
    if kind == "upload":  # gRPC for asyncio may lose the reason of an attempt, and then the error says that of the last
        lost = r"the server ended the upload before it had all of it; gRPC lost the reason"
        said = rf"^({CANCELLED}|{lost} \(5 attempts; the last one failed with: {CANCELLED}\)) \[GS_CONNECTION_LOST\]$"
    aio_client = gradserve.aio.connect(cancelling.address, timeout=PATIENCE_SECONDS, transport="grpc")
    with pytest.raises(gradserve.UnavailableError, match=said):
        await CALLS[kind](aio_client)
    assert cancelling.met == 2 * attempts
    await aio_client.close()


async def test_another_attempt_is_answered(cancelling: Cancelling) -> None:
    cancelling.left = 1
    with gradserve.connect(cancelling.address, timeout=PATIENCE_SECONDS, transport="grpc") as client:
        assert (await asyncio.to_thread(client.server_info)).version == "1.2.3"
    cancelling.left = 1
    async with gradserve.aio.connect(cancelling.address, timeout=PATIENCE_SECONDS, transport="grpc") as client:
        assert (await client.server_info()).version == "1.2.3"
    assert cancelling.met == 4
