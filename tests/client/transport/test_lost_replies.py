"""A call whose reply nobody gets leaves nothing: its client gives a receipt back, or the server notices."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.calls.exchange import NOT_CARRIED, Unary, Upload, Whole
from gradserve.calls.retries import take_receipt
from gradserve.calls.tensors import placement_of
from gradserve.errors import UnavailableError
from gradserve.transport.network import LostReplies, Server
from gradserve_protocol.v1 import accumulator_messages_pb2, tensor_messages_pb2
from gradserve_server.config import ServerConfig
from gradserve_server.rpc.listeners.grpc import listener
from gradserve_server.rpc.listeners.sockets.connection import Connection
from gradserve_testing import LocalServer
from tests.servers.polling import PATIENCE_SECONDS, eventually, eventually_async
from tests.servers.runtime import NOT_WARMED_UP

LARGE = np.ones((1000, 1500), np.float32)
"""Too much for a message."""
SMALL = np.ones((4, 8), np.float32)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
        yield server.address


class InterruptionError(BaseException):
    """An exception from outside that ends a call, as of a signal or the end of a task."""


@dataclass
class Losing:
    """Loses the replies to one method.

    Attributes:
        method: The method, "" for none.
        error: What the client gets in place of the reply.
        num_times: The replies that are still to be lost.
    """

    method: str = ""
    error: BaseException | None = None
    num_times: int = 0

    def meets(self, exchange: object) -> bool:
        call = exchange.call if isinstance(exchange, Whole) else exchange
        method = call.method if isinstance(call, Unary) else "PutTensors" if isinstance(call, Upload) else ""
        if not self.num_times or method != self.method:
            return False
        self.num_times -= 1
        return True


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> Losing:
    losing, real = Losing(), Server.carry

    async def carry(self: Any, attempt: Any, watch: Any = None) -> Any:
        reply = await real(self, attempt, watch)
        if reply is NOT_CARRIED:
            return reply
        if losing.error is not None and losing.meets(attempt.exchange):
            raise losing.error  # the server has sent the reply
        return reply

    monkeypatch.setattr(Server, "carry", carry)
    return losing


async def layer_norm(client: gradserve.aio.Client, _name: str, x: Any) -> Any:
    return await client.raw_ops.LayerNorm(x=x, scale=x[0], offset=x[0], keep=isinstance(x, np.ndarray) and x is SMALL)


async def forward(client: gradserve.aio.Client, name: str, x: Any) -> Any:
    layer = await client.batch_norm(scope=name, input_shape=x.shape, dtype=np.float32)
    return await layer(x, is_training=True, keep=x is SMALL)


async def take(client: gradserve.aio.Client, name: str, x: Any) -> Any:
    model = await client.gradient_accumulator({"w": x}, shared_name=name)
    await model.apply_grad({"w": x})
    return await model.take_grad(1)


async def read_average(client: gradserve.aio.Client, name: str, x: Any) -> Any:
    model = await client.gradient_accumulator({"w": x}, shared_name=name, keep_averages=2)
    await model.push_pull({"w": x}, 1)
    return await model.read_average()


async def push_pull(client: gradserve.aio.Client, name: str, x: Any) -> Any:
    model = await client.gradient_accumulator({"w": x}, shared_name=name)
    return await model.push_pull({"w": x}, 1)


async def read_parameters(client: gradserve.aio.Client, name: str, x: Any) -> Any:
    parameters = await client.parameters({"w": x}, shared_name=name)
    return await parameters.read()


async def put(client: gradserve.aio.Client, _name: str, x: Any) -> Any:
    return await client.put(x)


Case = tuple[Callable[[gradserve.aio.Client, str, Any], Awaitable[Any]], str, Any]
CASES: dict[str, Case] = {
    "an op's large outputs": (layer_norm, "LayerNorm", LARGE),
    "an op's kept outputs": (layer_norm, "LayerNorm", SMALL),
    "a layer's large outputs": (forward, "BatchNormForward", LARGE),
    "a layer's kept outputs": (forward, "BatchNormForward", SMALL),
    "a taken average": (take, "TakeGradient", LARGE),
    "an average that is read": (read_average, "ReadAverage", LARGE),
    "an average that is pushed for": (push_pull, "PushPull", LARGE),
    "parameters": (read_parameters, "ReadParameters", LARGE),
    "an upload": (put, "PutTensors", LARGE),
    "an upload of a call": (push_pull, "PutTensors", LARGE),
    "an upload over a socket": (put, "StoreTensors", LARGE),
}
SOCKETS = {"an op's kept outputs", "a layer's kept outputs", "an upload over a socket"}
"""The tensors that stay on the server after a call over a socket."""
TABLE = [("grpc", case) for case in CASES if case != "an upload over a socket"] + [
    (way, case) for way in ("shared_memory", "bulk") for case in SOCKETS
]


@pytest.mark.parametrize(("way", "case"), TABLE)
async def test_a_call_that_is_interrupted_while_its_reply_is_on_the_way_leaves_nothing(
    address: str, name: str, losing: Losing, way: Any, case: str
) -> None:
    call, losing.method, x = CASES[case]
    losing.error, losing.num_times = InterruptionError(), 1
    async with gradserve.aio.connect(address, transport=way, timeout=PATIENCE_SECONDS) as client:
        with pytest.raises(InterruptionError):
            await call(client, name, x)
        await eventually_async(client.list_tensors, lambda left: left == [])


@pytest.mark.parametrize(("way", "case"), TABLE)
async def test_a_call_that_is_repeated_as_its_reply_was_lost_leaves_only_what_the_caller_knows(
    address: str, name: str, losing: Losing, way: Any, case: str
) -> None:
    call, losing.method, x = CASES[case]
    losing.error, losing.num_times = UnavailableError("the connection has ended"), 2
    async with gradserve.aio.connect(address, transport=way, timeout=PATIENCE_SECONDS) as client:
        known = gradserve_handles(await call(client, name, x))
        await eventually_async(client.list_tensors, lambda left: {each.handle for each in left} == known)
        await client.delete(*[each for each in await client.list_tensors() if each.handle in known])


def gradserve_handles(value: Any) -> set[str]:
    """Returns the handles in a result."""
    if isinstance(value, gradserve.TensorHandle):
        return {value.handle}
    parts = value if isinstance(value, tuple) else vars(value).values() if hasattr(value, "outputs") else ()
    return set().union(*map(gradserve_handles, parts))


def test_a_thread_that_is_interrupted_leaves_nothing(address: str, losing: Losing) -> None:
    with gradserve.connect(address, transport="grpc", timeout=PATIENCE_SECONDS) as client:
        calls: dict[str, Callable[[], object]] = {
            "PutTensors": lambda: client.put(LARGE),
            "LayerNorm": lambda: client.raw_ops.LayerNorm(x=SMALL, scale=SMALL[0], offset=SMALL[0], keep=True),
        }
        for method, call in calls.items():
            losing.method, losing.error, losing.num_times = method, InterruptionError(), 1
            with pytest.raises(InterruptionError):
                call()
            eventually(client.list_tensors, lambda left: left == [])


@pytest.mark.parametrize("way", ["grpc", "shared_memory"])
async def test_a_client_that_leaves_while_a_reply_waits_leaves_nothing(
    address: str, monkeypatch: pytest.MonkeyPatch, way: Any
) -> None:
    """The server finds out by itself: this client does not say that it has lost a reply.

    Only a reply that the system, or gRPC, has taken before ends with its lease.
    """
    monkeypatch.setattr(LostReplies, "add", lambda *_: None)
    ready, left = threading.Event(), threading.Event()

    async def hold(real: Any, *given: Any) -> Any:
        ready.set()
        while not left.is_set():
            await asyncio.sleep(0)
        return await real(*given)

    admitted, reply = listener._admitted, Connection._reply
    async with gradserve.aio.connect(address, transport=way, timeout=PATIENCE_SECONDS) as client:
        with monkeypatch.context() as patch:
            patch.setattr(listener, "_admitted", lambda *given: hold(admitted, *given))
            patch.setattr(Connection, "_reply", lambda *given: hold(reply, *given))
            op = client.raw_ops.LayerNorm(x=SMALL, scale=SMALL[0], offset=SMALL[0], keep=True)
            task = asyncio.ensure_future(op)
            await asyncio.to_thread(ready.wait, PATIENCE_SECONDS)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        if way != "grpc":  # which ends the call by itself
            left.set()
    async with gradserve.aio.connect(address, timeout=PATIENCE_SECONDS) as other:
        await eventually_async(other.list_tensors, lambda seen: seen == [])


def test_every_attempt_has_a_receipt_of_its_own() -> None:
    take = Unary("A", "T", accumulator_messages_pb2.TakeGradientRequest(placement=placement_of(keep=False)))
    receipts = [take_receipt(Whole(take)), take_receipt(take), take_receipt(take)]
    assert len(set(receipts)) == 3
    assert all(receipts)
    for without in (
        accumulator_messages_pb2.TakeGradientRequest(),
        tensor_messages_pb2.DeleteTensorsRequest(),
        tensor_messages_pb2.StoreTensorsRequest(),
    ):
        assert take_receipt(Unary("A", "T", without)) == b""
