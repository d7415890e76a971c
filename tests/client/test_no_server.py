"""No server, one that goes away or comes back, and one that says nothing."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import gradserve
import gradserve.aio
from gradserve.calls.exchange import TimeLimits
from gradserve.testing import FaultyProxy, ServerProcess
from gradserve.transport.settings import ConnectionSettings, Transport
from gradserve_server.config import ServerConfig
from gradserve_testing import LocalServer
from tests.client.every_call import CALLS, failure_of, failure_of_aio, make_things, make_things_aio
from tests.servers.connecting import change_times, connect_with, no_server
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.runtime import NOT_WARMED_UP


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nobody listens, and nobody will."""
    with no_server() as address:
        yield address


NEVER_SECONDS = 1e6
"""The timeout of clients whose calls end without it: after five attempts, which take some seconds."""


def test_unreachable(nobody: str, server_address: str) -> None:
    """Objects made with a server, then called without."""
    with gradserve.connect(server_address) as helper:
        handle = make_things(helper)["handle"]
    client = gradserve.connect(nobody, timeout=NEVER_SECONDS)
    names = [name for name, call in CALLS.items() if not needs_what_was_made(call)]
    with ThreadPoolExecutor(len(names)) as threads:
        failures = dict(
            zip(
                names,
                threads.map(lambda each: failure_of(lambda: CALLS[each](client, {"handle": handle})), names),
                strict=True,
            )
        )
    client.close()
    assert {name: type(failure) for name, failure in failures.items()} == dict.fromkeys(
        names, gradserve.UnavailableError
    )


async def test_unreachable_aio(nobody: str, server_address: str) -> None:
    with gradserve.connect(server_address) as helper:
        handle = make_things(helper)["handle"]
    names = [name for name, call in CALLS.items() if not needs_what_was_made(call)]
    async with gradserve.aio.connect(nobody, timeout=NEVER_SECONDS) as client:
        failures = await asyncio.gather(*(failure_of_aio(CALLS[name](client, {"handle": handle})) for name in names))
    assert dict(zip(names, map(type, failures), strict=True)) == dict.fromkeys(names, gradserve.UnavailableError)


def needs_what_was_made(call: Callable[..., Any]) -> bool:
    return any(
        constant in ("dense", "large", "sparse", "model", "parameters", "layer") for constant in call.__code__.co_consts
    )


def test_a_server_that_went_away() -> None:
    """Also calls of accumulators that were made before end with UnavailableError."""
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
        client = gradserve.connect(server.address, timeout=NEVER_SECONDS)
        made = make_things(client)
    with ThreadPoolExecutor(len(CALLS)) as threads:
        failures = dict(
            zip(CALLS, threads.map(lambda call: failure_of(lambda: call(client, made)), CALLS.values()), strict=True)
        )
    client.close()
    assert {name: type(failure) for name, failure in failures.items()} == dict.fromkeys(
        CALLS, gradserve.UnavailableError
    )


def test_a_server_that_came_back(tmp_path: Path) -> None:
    """A client needs no new connection for a new server at the address."""
    address = f"unix:{tmp_path}/socket"
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with gradserve.connect(address) as client:
        with ServerProcess(tmp_path / "first", listen=(address,)):
            client.server_info()
        with pytest.raises(gradserve.UnavailableError):
            client.server_info()
        with ServerProcess(tmp_path / "second", listen=(address,)):
            assert eventually(lambda: failure_of(client.server_info) is None)


SHORT_TIMES = TimeLimits(0.5, reply=0.3)


def test_every_call_has_a_deadline(server_address: str) -> None:
    with FaultyProxy(server_address) as proxy:
        client = gradserve.connect(proxy.address, timeout=PATIENCE_SECONDS, transport="grpc")
        made = make_things(client)
        silent = connect_with(proxy.address, ConnectionSettings(SHORT_TIMES, transport=Transport.GRPC))
        change_times(client, SHORT_TIMES)
        proxy.partition()
        with ThreadPoolExecutor(len(CALLS)) as threads:
            failures = dict(
                zip(
                    CALLS, threads.map(lambda call: failure_of(lambda: call(silent, made)), CALLS.values()), strict=True
                )
            )
        assert {name: type(failure) for name, failure in failures.items()} == dict.fromkeys(
            CALLS, gradserve.DeadlineExceededError
        )
        client.close()
        silent.close()


async def test_every_call_has_a_deadline_aio(server_address: str) -> None:
    with FaultyProxy(server_address) as proxy:
        client = gradserve.aio.connect(proxy.address, timeout=PATIENCE_SECONDS, transport="grpc")
        made = await make_things_aio(client)
        change_times(client, SHORT_TIMES)
        proxy.partition()
        async with asyncio.timeout(PATIENCE_SECONDS):
            failures = await asyncio.gather(*(failure_of_aio(call(client, made)) for call in CALLS.values()))
            await client.close()
        assert dict(zip(CALLS, map(type, failures), strict=True)) == dict.fromkeys(
            CALLS, gradserve.DeadlineExceededError
        )


def test_a_server_that_accepts_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = gradserve.connect(f"127.0.0.1:{silent.getsockname()[1]}", timeout=0.3)
        for call in (client.server_info, lambda: client.put([1.0]), lambda: client.conditional_accumulator("float32")):
            started = time.monotonic()
            with pytest.raises(gradserve.DeadlineExceededError):
                call()
            assert time.monotonic() - started > 0.2
        client.close()
