"""How long calls wait: some seconds, for ever, or not at all because no timeout can be like that."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from google.protobuf.descriptor import MethodDescriptor

import gradserve
import gradserve.aio
from gradserve.calls.exchange import TimeLimits
from gradserve.calls.retries import RetryPolicy
from gradserve.testing import FaultyProxy
from gradserve.transport.settings import ConnectionSettings, Keepalive, Reconnecting, Transport
from gradserve_server.commands.cli import cli
from gradserve_server.config import ServerConfig
from gradserve_server.parts import Parts
from gradserve_server.rpc.boundary.chain import Call, Handle
from gradserve_server.rpc.boundary.fields import wait_timeout
from gradserve_server.rpc.listeners.grpc.listener import ClientKeepalive, GrpcListener
from gradserve_testing import LocalServer
from tests.servers.connecting import connect_with, connect_with_aio
from tests.servers.polling import PATIENCE_SECONDS, eventually, eventually_async
from tests.servers.runtime import NOT_WARMED_UP

BAD = [-1.0, -math.inf, math.nan, 1e12]


@pytest.mark.parametrize("timeout", BAD)
def test_a_wait_that_cannot_be(client: gradserve.Client, timeout: float) -> None:
    acc = client.conditional_accumulator("float32")
    waits: list[Callable[[], object]] = [
        lambda: acc.take_grad(1, timeout),
        lambda: acc.read_average(1, timeout),
    ]
    for wait in waits:
        with pytest.raises(gradserve.InvalidArgumentError, match=r"expected a timeout of at least 0 s, math.inf for"):
            wait()


@pytest.mark.parametrize("timeout", BAD)
async def test_a_timeout_of_a_client_that_cannot_be(timeout: float) -> None:
    for connect in (gradserve.connect, gradserve.aio.connect):
        with pytest.raises(gradserve.InvalidArgumentError, match="expected a timeout of at least 0 s"):
            connect("localhost:1", timeout=timeout)


# --- For ever

GRAD = np.ones(2, np.float32)


def make_things(client: gradserve.Client) -> dict[str, Any]:
    return {
        "dense": client.conditional_accumulator("float32"),
        "sparse": client.sparse_conditional_accumulator("float32"),
        "model": client.gradient_accumulator({"w": GRAD}),
    }


async def make_things_aio(client: gradserve.aio.Client) -> dict[str, Any]:
    return {
        "dense": await client.conditional_accumulator("float32"),
        "sparse": await client.sparse_conditional_accumulator("float32"),
        "model": await client.gradient_accumulator({"w": GRAD}),
    }


Wait = Callable[[dict[str, Any], float | None], Any]

WAITS: dict[str, Wait] = {
    "dense take": lambda made, timeout: made["dense"].take_grad(1, timeout),
    "dense read": lambda made, timeout: made["dense"].read_average(timeout=timeout),
    "sparse take": lambda made, timeout: made["sparse"].take_grad(1, timeout),
    "sparse read": lambda made, timeout: made["sparse"].read_average(timeout=timeout),
    "model take": lambda made, timeout: made["model"].take_grad(1, timeout),
    "model read": lambda made, timeout: made["model"].read_average(timeout=timeout),
    "push_pull": lambda made, timeout: made["model"].push_pull({"w": GRAD}, 2, timeout=timeout),
}


class NotedLimits:
    """An interceptor that notes for how long each call may wait, as they come; None for ever."""

    def __init__(self) -> None:
        self.seen: list[float | None] = []

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        if "timeout" not in method.input_type.fields_by_name:
            return handle

        def noted(request: Any, call: Call) -> Any:
            self.seen.append(wait_timeout(request, call))
            return handle(request, call)

        return noted


@pytest.fixture(scope="module")
def noted() -> Iterator[tuple[str, NotedLimits]]:
    """The address of a server of this file alone, and the limits of its calls."""
    limits = NotedLimits()
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP), Parts(interceptors=(limits,))) as local:
        yield local.address, limits


@pytest.fixture
def limits(noted: tuple[str, NotedLimits]) -> list[float | None]:
    """For how long that server lets each call wait, as they come; None for ever."""
    _, limits = noted
    limits.seen.clear()
    return limits.seen


@pytest.fixture
def noted_address(noted: tuple[str, NotedLimits]) -> str:
    address, _ = noted
    return address


@pytest.mark.sampled
@pytest.mark.parametrize(("of_client", "of_call"), [(5.0, math.inf), (math.inf, None)])
@pytest.mark.parametrize("wait", WAITS)
def test_a_call_waits_for_ever(
    noted_address: str, limits: list[float | None], wait: str, of_client: float, of_call: float | None
) -> None:
    with gradserve.connect(noted_address, timeout=of_client) as client, ThreadPoolExecutor(1) as threads:
        made = make_things(client)
        waiting = threads.submit(WAITS[wait], made, of_call)
        eventually(lambda: limits)
        # The end of the wait is not lost on a call without a limit: neither a result nor an error.
        made[wait.split()[0] if wait != "push_pull" else "model"].delete()
        with pytest.raises(gradserve.AbortedError, match="was deleted"):
            waiting.result(PATIENCE_SECONDS)
    assert limits == [None]


@pytest.mark.parametrize(("of_client", "of_call"), [(5.0, math.inf), (math.inf, None)])
async def test_a_call_waits_for_ever_aio(
    noted_address: str, limits: list[float | None], of_client: float, of_call: float | None
) -> None:
    async with gradserve.aio.connect(noted_address, timeout=of_client) as client:
        acc = (await make_things_aio(client))["dense"]
        waiting = asyncio.create_task(acc.take_grad(1, of_call))

        async def noted_limits() -> list[float | None]:
            return limits

        await eventually_async(noted_limits)
        await acc.apply_grad(GRAD)
        assert np.array_equal(await waiting, GRAD)
    assert limits == [None]


def test_a_finite_wait_of_a_client_without_limit(server_address: str) -> None:
    with gradserve.connect(server_address, timeout=math.inf) as client:
        acc = client.conditional_accumulator("float32")
        with pytest.raises(gradserve.DeadlineExceededError, match=r"within 0\.1 s"):
            acc.take_grad(1, timeout=0.1)


LARGE = np.ones(1 << 20, np.float32)


def test_streams_without_limit(server_address: str) -> None:
    with gradserve.connect(server_address, timeout=math.inf) as client:
        handle = client.put(LARGE)
        assert np.array_equal(client.get(handle, release=True), LARGE)


async def test_streams_without_limit_aio(server_address: str) -> None:
    async with gradserve.aio.connect(server_address, timeout=math.inf) as client:
        handle = await client.put(LARGE)
        assert np.array_equal(await client.get(handle, release=True), LARGE)


@pytest.mark.parametrize("command", ["health", "info"])
def test_commands_without_limit(server_address: str, command: str) -> None:
    result = CliRunner().invoke(cli, [command, server_address, "--timeout", "inf"])
    assert result.exit_code == 0, result.output


# --- What ends a wait for ever


def test_closing_the_client_ends_it(client: gradserve.Client, server_address: str, name: str) -> None:
    acc = client.conditional_accumulator("float32", shared_name=name)
    closing = gradserve.connect(server_address, timeout=math.inf)
    take = closing.conditional_accumulator("float32", shared_name=name).take_grad
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(take, 1)
        eventually(lambda: acc.info().num_waiting == 1)
        closing.close()
        with pytest.raises(gradserve.CallCancelledError):
            waiting.result(PATIENCE_SECONDS)
    eventually(lambda: acc.info().num_waiting == 0)
    acc.delete()


async def test_closing_the_client_or_cancelling_the_task_ends_it_aio(server_address: str, name: str) -> None:
    async with gradserve.aio.connect(server_address) as client:
        acc = await client.conditional_accumulator("float32", shared_name=name)

        async def num_waiting() -> int:
            return (await acc.info()).num_waiting

        other = gradserve.aio.connect(server_address, timeout=math.inf)
        take = (await other.conditional_accumulator("float32", shared_name=name)).take_grad
        waiting = asyncio.create_task(take(1))
        await eventually_async(num_waiting)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await eventually_async(num_waiting, lambda count: count == 0)
        waiting = asyncio.create_task(take(1))
        await eventually_async(num_waiting)
        await other.close()
        with pytest.raises(gradserve.CallCancelledError):
            await asyncio.wait_for(waiting, PATIENCE_SECONDS)
        await eventually_async(num_waiting, lambda count: count == 0)
        await acc.delete()


IMPATIENT = ConnectionSettings(
    TimeLimits(math.inf),
    retries=RetryPolicy(pauses=(0.1,), restart_patience=0),
    keepalive=Keepalive(interval=0.3, timeout=1.0),
    reconnecting=Reconnecting(attempt=1.0),
)
"""Of clients that notice soon that nothing comes from a server, also where they connect, and try once more."""


@pytest.mark.parametrize("transport", [Transport.GRPC, Transport.BULK])
def test_a_server_that_falls_silent_ends_it(server_address: str, transport: Transport) -> None:
    with FaultyProxy(server_address) as proxy, ThreadPoolExecutor(1) as threads:
        client = connect_with(proxy.address, replace(IMPATIENT, transport=transport))
        acc = client.conditional_accumulator("float32")
        waiting = threads.submit(acc.take_grad, 1)
        eventually(lambda: acc.info().num_waiting == 1)
        proxy.partition()
        with pytest.raises(gradserve.UnavailableError):
            waiting.result(PATIENCE_SECONDS)
        client.close()


@pytest.mark.parametrize("transport", [Transport.GRPC, Transport.BULK])
async def test_a_server_that_falls_silent_ends_it_aio(server_address: str, transport: Transport) -> None:
    with FaultyProxy(server_address) as proxy:
        client = connect_with_aio(proxy.address, replace(IMPATIENT, transport=transport))
        acc = await client.conditional_accumulator("float32")

        async def num_waiting() -> int:
            return (await acc.info()).num_waiting

        waiting = asyncio.create_task(acc.take_grad(1))
        await eventually_async(num_waiting)
        proxy.partition()
        with pytest.raises(gradserve.UnavailableError):
            await asyncio.wait_for(waiting, PATIENCE_SECONDS)
        await client.close()


def test_a_client_that_falls_silent_takes_no_round() -> None:
    """Its machine or network is gone, and nothing tells the server: what it waits for goes to others."""
    parts = Parts(make_listener=partial(GrpcListener, keepalive=ClientKeepalive(interval=0.3, timeout=0.3)))
    with (
        LocalServer(ServerConfig(runtime=NOT_WARMED_UP), parts) as server,
        FaultyProxy(server.address) as proxy,
        gradserve.connect(server.address) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        acc = client.conditional_accumulator("float32", shared_name="acc")
        lost = gradserve.connect(proxy.address, timeout=math.inf, transport="grpc")
        waiting: Future[Any] = threads.submit(lost.conditional_accumulator("float32", shared_name="acc").take_grad, 1)
        eventually(lambda: acc.info().num_waiting == 1)
        proxy.partition()
        eventually(lambda: acc.info().num_waiting == 0)
        acc.apply_grad(GRAD)
        assert np.array_equal(acc.take_grad(1, timeout=PATIENCE_SECONDS), GRAD)
        closing = threading.Thread(target=lost.close)
        closing.start()
        closing.join(PATIENCE_SECONDS)
        assert not closing.is_alive()
        assert waiting.exception(PATIENCE_SECONDS) is not None
