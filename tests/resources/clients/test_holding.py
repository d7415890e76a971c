"""Clients that live hold what is theirs, for as long as they have something and are not forgotten."""

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import gradserve
import gradserve.aio
from gradserve.calls.exchange import TimeLimits
from gradserve.testing import FaultyProxy
from gradserve.transport.settings import ConnectionSettings, Transport
from gradserve_server.config import ListenConfig
from tests.resources.clients.aging_server import CLIENT_LEASE, AgingServer, num_held, num_private, pass_time
from tests.servers.connecting import connect_with
from tests.servers.polling import PATIENCE_SECONDS, eventually, eventually_async


@pytest.mark.timing  # gRPC's threads have to get a processor within a second
async def test_a_blocked_event_loop_costs_nothing(watchful_server: AgingServer) -> None:
    """Everything here but the first lines happens while the loop of the client stands still."""
    async with gradserve.aio.connect(watchful_server.address) as client:
        acc = await client.conditional_accumulator("float32")

        async def held() -> int:
            return num_held(watchful_server)

        await eventually_async(held)
        time.sleep(1.5)  # noqa: ASYNC251 - longer than the server waits for a sign of life
        assert num_held(watchful_server) == 1
        pass_time(watchful_server, 100 * CLIENT_LEASE)
        assert num_private(watchful_server) == 1
        assert (await acc.info()).is_private


def start(address: str) -> AgingServer:
    """Returns a server for an address that it is given."""
    local = AgingServer()
    local._config = local._config.model_copy(update={"listen": ListenConfig(listen=(address,))})
    return local


def test_a_server_that_is_started_anew_is_held_to_its_word_too(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/socket"
    with gradserve.connect(address) as client:
        with start(address) as first:
            old = client.conditional_accumulator("float32")
            eventually(lambda: num_held(first) == 1)
        with start(address) as second:
            assert old.info().is_private, "nothing was lost with it, so it is created again"
            new = client.conditional_accumulator("float32")
            eventually(lambda: num_held(second) == 1)
            pass_time(second, 100 * CLIENT_LEASE)
            assert new.info().is_private
            assert old.delete()


def test_a_connection_that_breaks_is_held_anew(server: AgingServer) -> None:
    with FaultyProxy(server.address) as proxy:
        settings = ConnectionSettings(TimeLimits(PATIENCE_SECONDS, closing=0.3), transport=Transport.GRPC)
        client = connect_with(proxy.address, settings)
        client.conditional_accumulator("float32")
        eventually(lambda: num_held(server) == 1)
    eventually(lambda: num_held(server) == 0)
    pass_time(server, CLIENT_LEASE)
    assert num_private(server) == 0
    client.close()


def background_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "gradserve-background"}


@pytest.mark.parametrize("things", [0, 1, 100])
def test_a_thread_only_while_there_is_something(server: AgingServer, things: int) -> None:
    before = background_threads()  # of clients before, which may end at any time
    with gradserve.connect(server.address) as client:
        client.conditional_accumulator("float32", shared_name="shared").delete()
        made = [client.conditional_accumulator("float32") for _ in range(things)]
        assert len(background_threads() - before) == min(things, 1)
        for each in made:
            each.delete()
        eventually(lambda: background_threads() <= before)
        assert len(client._calls._lease) == 0
    assert background_threads() <= before


def test_threads_that_make_and_delete_at_the_same_time(server: AgingServer) -> None:
    with gradserve.connect(server.address) as client, ThreadPoolExecutor(8) as threads:

        def make_and_delete(number: int) -> None:
            acc = client.conditional_accumulator("float32", name=f"n{number}")
            acc.apply_grad(1.0)
            assert acc.delete()

        list(threads.map(make_and_delete, range(200)))
        kept = client.conditional_accumulator("float32")
        eventually(lambda: num_held(server) == 1)
        pass_time(server, 100 * CLIENT_LEASE)
        assert kept.info().is_private
        assert len(client._calls._lease) == num_private(server) == 1
        assert kept.delete()
        eventually(lambda: not background_threads())
    assert server.inspect(lambda server: (len(server.lifetimes.clients), server.lifetimes.num_leases)) == (0, 0)


def test_a_forgotten_client_is_no_longer_held(server: AgingServer) -> None:
    """The program has neither the client nor anything that it made; an accumulator alone is enough."""
    acc = gradserve.connect(server.address).conditional_accumulator("float32")
    gc.collect()
    eventually(lambda: num_held(server) == 1)
    assert acc.info().is_private
    del acc
    gc.collect()
    eventually(lambda: num_held(server) == 0)
    eventually(lambda: not background_threads())


async def test_a_forgotten_asyncio_client_is_no_longer_held(server: AgingServer) -> None:
    acc = await gradserve.aio.connect(server.address).conditional_accumulator("float32")

    async def held() -> int:
        return num_held(server)

    gc.collect()
    await eventually_async(held)
    assert (await acc.info()).is_private
    del acc
    gc.collect()
    await eventually_async(held, lambda count: count == 0)


async def test_a_task_only_while_there_is_something(server: AgingServer) -> None:
    def tasks() -> list["asyncio.Task[Any]"]:
        return [each for each in asyncio.all_tasks() if each.get_name() == "gradserve-background"]

    async with gradserve.aio.connect(server.address) as client:
        acc = await client.conditional_accumulator("float32")
        layer = await client.batch_norm()
        assert len(tasks()) == 1
        await acc.delete()
        assert len(tasks()) == 1
        await layer.delete()
        await asyncio.wait(tasks(), timeout=PATIENCE_SECONDS)
        assert tasks() == []
        await client.conditional_accumulator("float32")
        assert len(tasks()) == 1
    assert tasks() == []
    assert num_private(server) == 0
