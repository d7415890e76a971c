"""Many connections and many calls: how many there may be, and how others still get in."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

import gradserve
from gradserve_server.app import Server
from gradserve_server.config import LimitsConfig, RuntimeConfig, ServerConfig
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.rpc.boundary.open_calls import OpenCalls
from gradserve_server.rpc.health.check import check_health
from gradserve_server.rpc.listeners.idle_connections import IdleConnections
from gradserve_server.testing import LocalServer
from tests.floods.contexts import OneCall
from tests.servers.polling import PATIENCE_SECONDS, eventually, eventually_async
from tests.servers.raw_http2 import CANCEL, HELLO, RST_STREAM, call, connect, frame, headers, is_ended, request_fields

INFO = "/gradserve.v1.ServerService/GetServerInfo"
WATCH = "/grpc.health.v1.Health/Watch"
HOLD = "/gradserve.v1.LeaseService/HoldClientLease"
LIMITS = LimitsConfig(max_connection_calls=20, max_calls=30, max_connections=6)


@pytest.fixture(scope="module")
def local() -> Iterator[LocalServer]:
    with LocalServer(ServerConfig(limits=LIMITS, runtime=RuntimeConfig(warm_up=False))) as local:
        yield local


def num_calls(local: LocalServer) -> int:
    def look(server: Server) -> int:
        listener: Any = server._listener
        count: int = listener.traffic.calls.count
        return count

    return local.inspect(look)


def waiting(count: int, path: str, message: bytes = b"") -> bytes:
    return HELLO + b"".join(call(path, message, stream=stream) for stream in range(1, 2 * count, 2))


def test_calls_of_one_connection(local: LocalServer) -> None:
    with connect(local.address) as greedy, gradserve.connect(local.address) as other:
        greedy.sendall(waiting(50, WATCH))
        eventually(lambda: num_calls(local) >= LIMITS.max_connection_calls)
        assert other.server_info().version
        eventually(lambda: num_calls(local) == LIMITS.max_connection_calls)
    eventually(lambda: num_calls(local) == 0)


def test_calls_of_all_connections(local: LocalServer) -> None:
    with contextlib.ExitStack() as using:
        several = [using.enter_context(connect(local.address)) for _ in range(3)]
        for each in several:
            each.sendall(waiting(20, WATCH))
        eventually(lambda: num_calls(local) == LIMITS.max_calls)
        with (
            gradserve.connect(local.address, transport="grpc") as client,
            pytest.raises(gradserve.ResourceExhaustedError, match="too many calls: 30 are under way, 30 are allowed"),
        ):
            client.server_info()
        assert check_health(local.address, timeout=PATIENCE_SECONDS) == "SERVING"  # there is a reserve for them
    eventually(lambda: num_calls(local) == 0)


def test_calls_that_are_reset_at_once(local: LocalServer) -> None:
    fields = request_fields(INFO)
    with connect(local.address) as connection, contextlib.suppress(OSError):
        for first in range(1, 4000, 200):
            streams = range(first, first + 200, 2)
            connection.sendall(
                (HELLO if first == 1 else b"")
                + b"".join(headers(fields, stream) + frame(RST_STREAM, 0, stream, CANCEL) for stream in streams)
            )
        with gradserve.connect(local.address, transport="grpc") as client:
            assert client.server_info().version
    eventually(lambda: num_calls(local) == 0)


def test_sockets_for_which_there_is_no_room(local: LocalServer) -> None:
    with gradserve.connect(local.address) as client, contextlib.ExitStack() as using:
        place = local.inspect(lambda server: server._socket_addresses.tcp[0])
        address = f"127.0.0.1:{place.port}"
        open_ones = [using.enter_context(connect(address)) for _ in range(LIMITS.max_connections)]
        eventually(lambda: local.inspect(lambda server: len(server._sockets._connections)) == len(open_ones))
        with connect(address) as one_more:
            one_more.settimeout(PATIENCE_SECONDS)
            assert b"too many connections: 6 are allowed" in one_more.recv(1 << 12)
        assert client.server_info().version


async def test_who_is_idle_makes_way_for_newcomers() -> None:
    calls = OpenCalls(100, 100)
    idle = IdleConnections(8, calls, look_seconds=0.01)
    with contextlib.ExitStack() as using:
        listener = using.enter_context(socket.create_server(("127.0.0.1", 0)))
        accepted, clients = [], []
        for _ in range(8):
            clients.append(using.enter_context(socket.create_connection(listener.getsockname())))
            accepted.append(using.enter_context(listener.accept()[0]))
        for each in clients[:2]:
            calls.begin(OneCall(f"ipv4:127.0.0.1:{each.getsockname()[1]}").context)
        keeping = asyncio.create_task(idle.keep_room([listener.getsockname()[1]]))

        async def num_ended() -> int:
            return sum(map(is_ended, clients))

        await eventually_async(num_ended, lambda number: number == 2)
        assert not any(map(is_ended, clients[:2]))  # those with a call
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_who_is_idle_for_longest_comes_first() -> None:
    calls = OpenCalls(100, 100)
    for name in "abc":
        one = OneCall(name)
        calls.begin(one.context)
        if name != "b":
            one.end()
    assert calls.idle("cdba", since=float("inf")) == ["d", "a", "c"]
    assert calls.idle("cdba", since=0) == ["d"]


async def test_callers_are_forgotten_unless_they_have_a_call() -> None:
    calls = OpenCalls(100, 2)
    for number in range(10):
        one = OneCall(str(number))
        calls.begin(one.context)
        if number:
            one.end()
    assert len(calls._callers) <= 3
    assert calls.idle(["0"], since=float("inf")) == []


async def test_health_checks_have_a_reserve() -> None:
    calls = OpenCalls(8, 8)
    for _ in range(8):
        calls.begin(OneCall("a").context)
    with pytest.raises(ResourceExhaustedError):
        calls.begin(OneCall("b").context)
    calls.begin(OneCall("b").context, is_health=True)
    with pytest.raises(ResourceExhaustedError):
        calls.begin(OneCall("b").context, is_health=True)
