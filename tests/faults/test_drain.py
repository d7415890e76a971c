"""Every operation, on every way, on a server that drains: all are answered, and nothing is left in its process."""

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

import gradserve
from gradserve.transport.settings import Transport
from gradserve_server.config import RuntimeConfig, ServerConfig
from gradserve_server.parts import Parts
from gradserve_testing import LocalServer
from tests.faults.gate import Gate
from tests.faults.operations import OPERATIONS, WAITING, Operation, Place
from tests.servers.connecting import connect_with_aio, without_retries
from tests.servers.holding import Hold
from tests.servers.polling import PATIENCE_SECONDS, eventually, eventually_async

WAYS = [Transport.GRPC, Transport.BULK, Transport.SHARED_MEMORY]
CONFIG = ServerConfig(runtime=RuntimeConfig(warm_up=False, drain_seconds=0.2))
ALL = OPERATIONS | WAITING


def server_threads() -> int:
    """Returns how many threads of servers there are in this process."""
    return sum(each.name.startswith("gradserve") for each in threading.enumerate())


async def test_every_call_is_answered(name: str) -> None:
    before = server_threads()
    assert await errors_of_all(name) == Counter({gradserve.UnavailableError: len(WAYS) * len(ALL)})
    eventually(lambda: server_threads() <= before)


async def test_a_push_pull_whose_gradient_is_being_added_does_not_keep_it_waiting(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = Hold(monkeypatch)
    patient = ServerConfig(runtime=RuntimeConfig(warm_up=False, drain_seconds=10 * PATIENCE_SECONDS))
    local = LocalServer(patient)
    local.__enter__()
    operation = WAITING["push_pull, waiting"]
    async with connect_with_aio(local.address, without_retries(PATIENCE_SECONDS)) as client:
        with gradserve.connect(local.address, transport="grpc") as direct:
            place = prepared(Place(name, direct), operation)
        with hold.closed():
            call = asyncio.ensure_future(operation.begin(client, place, None))
            await asyncio.to_thread(hold.wait_until_held)
            ending = asyncio.ensure_future(asyncio.to_thread(local.__exit__, None, None, None))
            await eventually_async(_is_draining(local))
        with pytest.raises(gradserve.UnavailableError, match="shutting down"):
            await call
        await ending


def _is_draining(local: LocalServer) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return not local.server.services.admission.is_open

    return look


async def errors_of_all(name: str) -> Counter[type]:
    """Has a server drain while every call is under way; returns how the calls ended."""
    gate = Gate()
    local = LocalServer(CONFIG, Parts(interceptors=(gate,)))
    local.__enter__()

    async def under_way() -> tuple[int, int]:
        waiting = await asyncio.to_thread(local.inspect, lambda server: server.registry.factory.waiters.used)
        return gate.num_held, waiting

    async with AsyncExitStack() as clients:
        try:
            with gradserve.connect(local.address, transport="grpc", timeout=PATIENCE_SECONDS) as direct:
                places = {
                    (way, each): prepared(Place(f"{name}-{way}-{each}", direct), operation)
                    for way in WAYS
                    for each, operation in ALL.items()
                }
            gate.is_closed = True
            tasks = {}
            for way in WAYS:
                client = connect_with_aio(local.address, without_retries(PATIENCE_SECONDS, way))
                await clients.enter_async_context(client)
                for each, operation in ALL.items():
                    tasks[way, each] = asyncio.ensure_future(operation.begin(client, places[way, each], None))
            await eventually_async(under_way, (len(WAYS) * len(OPERATIONS), len(WAYS) * len(WAITING)).__eq__)
        finally:
            await asyncio.to_thread(local.__exit__, None, None, None)
        ended = await asyncio.gather(*tasks.values(), return_exceptions=True)
    return Counter(type(each) for each in ended)


def prepared(place: Place, operation: Operation) -> Place:
    return replace(place, given=operation.prepare(place))
