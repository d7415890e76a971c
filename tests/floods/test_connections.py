"""Many connections and many calls: how many there may be, and how others still get in."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import gradserve
from gradserve_server.app import Server
from gradserve_server.config import LimitsConfig, RuntimeConfig, ServerConfig
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.rpc.health.check import check_health
from gradserve_server.rpc.listeners.grpc import calls as calls_under_way
from gradserve_server.rpc.listeners.grpc.calls import IdleConnections, OpenCalls
from gradserve_testing import LocalServer
from tests.floods.contexts import OneCall
from tests.servers.certificates import Certificates
from tests.servers.polling import PATIENCE_SECONDS, eventually, eventually_async
from tests.servers.raw_http2 import (
    CANCEL,
    DATA,
    HELLO,
    PING,
    RST_STREAM,
    call,
    connect,
    frame,
    headers,
    is_ended,
    kinds_of,
    request_fields,
)

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
        listener: Any = server.listener
        count: int = listener.traffic.calls.count
        return count

    return local.inspect(look)


def open_calls(limit: int, max_callers: int, ended: list[str] | None = None) -> OpenCalls:
    return OpenCalls(limit, max_callers, 20, ([] if ended is None else ended).extend)


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


@contextlib.contextmanager
def event_loop_held(local: LocalServer) -> Iterator[None]:
    held, go_on = threading.Event(), threading.Event()

    def hold(_server: Server) -> None:
        held.set()
        go_on.wait(PATIENCE_SECONDS)

    thread = threading.Thread(target=local.inspect, args=(hold,))
    thread.start()
    held.wait(PATIENCE_SECONDS)
    try:
        yield
    finally:
        go_on.set()
        thread.join()


def send_and_wait(connection: socket.socket, data: bytes) -> None:
    """Returns when gRPC's core has taken what was sent: it answers a ping behind it."""
    connection.settimeout(PATIENCE_SECONDS)
    connection.sendall(data + frame(PING, payload=bytes(8)))
    answer = b""
    while PING not in kinds_of(answer):
        answer += connection.recv(1 << 16)


def test_calls_begun_and_reset_on_several_connections_do_not_cancel_those_of_others(local: LocalServer) -> None:
    fields = request_fields(INFO)
    begun_and_reset = HELLO + b"".join(
        headers(fields, stream) + frame(RST_STREAM, 0, stream, CANCEL)
        for stream in range(1, 2 * LIMITS.max_connection_calls, 2)
    )
    check = HELLO + call("/grpc.health.v1.Health/Check", b"")
    with contextlib.ExitStack() as using:
        connections = [using.enter_context(connect(local.address)) for _ in range(5)]
        with event_loop_held(local):  # nothing is taken from the queue
            for each in connections[1:]:
                send_and_wait(each, begun_and_reset)
            send_and_wait(connections[0], check)
        answer = b""
        while DATA not in kinds_of(answer):
            part = connections[0].recv(1 << 16)
            answer += part
            assert part
            assert RST_STREAM not in kinds_of(answer)


def test_who_only_begins_calls_and_gives_them_up_is_left(local: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_under_way, "_GIVEN_UP_PER_SECOND", 0.0)  # as this test is slower than an attacker
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(local.address, options) as channel, gradserve.connect(local.address) as other:
        watch: Any = channel.unary_stream(WATCH)
        kept = watch(b"", wait_for_ready=True)
        assert next(kept)

        def give_up_another() -> bool:
            another = watch(b"")
            with contextlib.suppress(grpc.RpcError):  # refused, as gRPC still counts some of those before
                next(another)
            another.cancel()
            return bool(kept.is_active())

        eventually(give_up_another, (False).__eq__)
        with pytest.raises(grpc.RpcError) as ended:
            next(kept)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert other.server_info().version


async def test_calls_that_were_given_up_are_forgotten_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now, raising=False)
    ended: list[str] = []
    calls = open_calls(100, 100, ended)
    one = OneCall("a")
    calls.begin(one.context)
    for _ in range(20):
        calls.give_up(one.context)
    assert not ended
    now = 0.1  # five less
    for _ in range(5):
        calls.give_up(one.context)
    assert not ended
    calls.give_up(one.context)
    assert ended == ["a"]


def test_sockets_for_which_there_is_no_room(local: LocalServer) -> None:
    with gradserve.connect(local.address) as client, contextlib.ExitStack() as using:
        place = local.inspect(lambda server: server.socket_addresses.tcp[0])
        address = f"127.0.0.1:{place.port}"
        open_ones = [using.enter_context(connect(address)) for _ in range(LIMITS.max_connections)]
        eventually(lambda: local.inspect(lambda server: len(server.sockets.connections)) == len(open_ones))
        with connect(address) as one_more:
            one_more.settimeout(PATIENCE_SECONDS)
            assert b"too many connections: 6 are allowed" in one_more.recv(1 << 12)
        assert client.server_info().version


@pytest.mark.parametrize("way", ["tcp", "tls", "unix"])
def test_silent_connections_to_grpc_count_before_their_handshake(
    certificates: Certificates, tmp_path: Path, way: str
) -> None:
    config = certificates.config() if way == "tls" else ServerConfig(runtime=RuntimeConfig(warm_up=False))
    address = f"unix:{tmp_path / 'socket'}" if way == "unix" else "127.0.0.1:0"
    config = config.model_copy(update={"limits": LIMITS})
    with LocalServer(config, address=address) as local, contextlib.ExitStack() as using:
        for _ in range(LIMITS.max_connections):
            using.enter_context(silent_connection(local.address))
        beyond = using.enter_context(silent_connection(local.address))
        beyond.settimeout(PATIENCE_SECONDS)
        with contextlib.suppress(ConnectionResetError):
            while beyond.recv(1 << 12):  # a server without TLS says hello first
                pass


def test_connections_with_tls_that_begin_at_once(certificates: Certificates) -> None:
    """gRPC asks for the newest certificates before each of them, and ended the process if it got the same again."""
    with LocalServer(certificates.config()) as local:
        for _ in range(30):
            with contextlib.ExitStack() as using:
                for _ in range(40):
                    using.enter_context(connect(local.address))
        with gradserve.connect(local.address, tls=certificates.client()) as client:
            assert client.server_info().version


def silent_connection(address: str) -> socket.socket:
    if not address.startswith("unix:"):
        return connect(address)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address.removeprefix("unix:"))
    return connection


async def test_who_is_idle_makes_way_for_newcomers() -> None:
    calls = open_calls(100, 100)
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
    calls = open_calls(100, 100)
    for name in "abc":
        one = OneCall(name)
        calls.begin(one.context)
        if name != "b":
            one.end()
    assert calls.idle("cdba", since=float("inf")) == ["d", "a", "c"]
    assert calls.idle("cdba", since=0) == ["d"]


async def test_callers_are_forgotten_unless_they_have_a_call() -> None:
    calls = open_calls(100, 2)
    for number in range(10):
        one = OneCall(str(number))
        calls.begin(one.context)
        if number:
            one.end()
    assert len(calls._callers) <= 3
    assert calls.idle(["0"], since=float("inf")) == []


async def test_health_checks_have_a_reserve() -> None:
    calls = open_calls(8, 8)
    for _ in range(8):
        calls.begin(OneCall("a").context)
    with pytest.raises(ResourceExhaustedError):
        calls.begin(OneCall("b").context)
    calls.begin(OneCall("b").context, is_health=True)
    with pytest.raises(ResourceExhaustedError):
        calls.begin(OneCall("b").context, is_health=True)
