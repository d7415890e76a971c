"""Replies that nobody reads: they count, wait for room, and end with their connection."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pydantic import ByteSize

import gradserve
from gradserve_protocol.v1 import tensor_messages_pb2 as messages_pb2
from gradserve_server.app import Server
from gradserve_server.config import LimitsConfig, RuntimeConfig, ServerConfig
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.rpc.listeners.grpc.calls import Connections, shut_down
from gradserve_server.rpc.listeners.grpc.flow import UnreadReplies
from gradserve_testing import LocalServer
from tests.accumulators.bench import turns
from tests.floods.contexts import OneCall
from tests.servers.polling import eventually
from tests.servers.raw_http2 import PREFACE, call, connect, is_ended, settings

KIB = 1 << 10
LIMITS = LimitsConfig(max_queued_bytes=ByteSize(1024 * KIB), message_idle_seconds=0.5)
READ, GET = (f"/gradserve.v1.TensorService/{method}" for method in ("ReadTensors", "GetTensors"))
INFO = "/gradserve.v1.ServerService/GetServerInfo"
BLIND = PREFACE + settings(initial_window_size=0)
"""The beginning of a connection over which no reply can come."""


@pytest.fixture(scope="module")
def local() -> Iterator[LocalServer]:
    with LocalServer(ServerConfig(limits=LIMITS, runtime=RuntimeConfig(warm_up=False))) as local:
        yield local


@pytest.fixture
def client(local: LocalServer) -> Iterator[gradserve.Client]:
    with gradserve.connect(local.address, transport="grpc") as client:
        yield client


def unread(local: LocalServer) -> int:
    def look(server: Server) -> int:
        listener: Any = server.listener
        used: int = listener.traffic.replies.used
        return used

    return local.inspect(look)


def memory(local: LocalServer) -> int:
    return local.inspect(lambda server: server.usage.memory.used)


def test_replies_that_nobody_reads(local: LocalServer, client: gradserve.Client) -> None:
    stored = client.put(np.zeros(50 * KIB, np.uint8))
    request = messages_pb2.ReadTensorsRequest(handles=[stored.handle]).SerializeToString()
    with connect(local.address) as blind:
        blind.sendall(BLIND + b"".join(call(READ, request, stream=stream) for stream in range(1, 200, 2)))
        taken = eventually(lambda: unread(local))
        assert taken <= LIMITS.max_queued_bytes // 4
        assert np.array_equal(client.get(stored), np.zeros(50 * KIB, np.uint8))  # others have room
        eventually(lambda: is_ended(blind))
    eventually(lambda: unread(local) == 0)
    client.delete(stored)
    assert memory(local) == 0


@pytest.mark.parametrize("window", [0, 1000])
def test_a_download_that_nobody_reads(local: LocalServer, client: gradserve.Client, window: int) -> None:
    stored = client.put(np.zeros(500 * KIB, np.uint8))
    request = messages_pb2.GetTensorsRequest(handles=[stored.handle]).SerializeToString()
    with connect(local.address) as blind:
        blind.sendall(PREFACE + settings(initial_window_size=window) + call(GET, request))
        eventually(lambda: unread(local))
        client.delete(stored)
        assert memory(local) or is_ended(blind)  # it is in use as long as there is the connection
        eventually(lambda: is_ended(blind))
    eventually(lambda: memory(local) == 0)


def test_small_replies_that_nobody_reads(local: LocalServer) -> None:
    with connect(local.address) as blind:
        blind.sendall(BLIND + b"".join(call(INFO, b"", stream=stream) for stream in range(1, 20, 2)))
        eventually(lambda: is_ended(blind))
    eventually(lambda: unread(local) == 0)


class Told(Connections):
    """Notes which connections end."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[str] = []

    def end(self, peers: Any) -> None:
        self.ended += peers


async def enter(replies: UnreadReplies, peer: str, num_bytes: int, *, is_kept: bool = True) -> OneCall:
    one = OneCall(peer)
    await replies.enter(one.context, num_bytes, is_kept=is_kept)
    return one


def replies_within(limit: int, idle_seconds: float = 60.0) -> UnreadReplies:
    return UnreadReplies(limit, idle_seconds, Told())


async def test_one_client_has_a_quarter_and_the_others_wait_for_room() -> None:
    replies = replies_within(800)
    first = await enter(replies, "a", 100)  # each counts twice
    second = asyncio.create_task(enter(replies, "a", 10))
    others = [await enter(replies, peer, 100) for peer in "bcd"]
    late = asyncio.create_task(enter(replies, "e", 10))
    await turns()
    assert (second.done(), late.done(), replies.used) == (False, False, 800)
    others[0].end()
    await turns()
    assert (second.done(), late.done(), replies.used) == (False, True, 620)
    first.end()
    await turns()
    assert (second.done(), replies.used) == (True, 440)
    for each in (second.result(), late.result(), *others[1:]):
        each.end()
    assert replies.used == 0


async def test_a_reply_longer_than_the_room() -> None:
    replies = replies_within(100)
    (await enter(replies, "a", 1000)).end()
    assert replies.used == 0


async def test_a_call_that_is_cancelled_while_it_waits() -> None:
    replies = replies_within(100)
    first = await enter(replies, "a", 50)
    given_up, later = (asyncio.create_task(enter(replies, "a", 50)) for _ in range(2))
    await turns()
    given_up.cancel()
    await turns()
    first.end()
    (await later).end()
    assert replies.used == 0


async def test_what_waits_is_limited_unless_it_is_kept_anyway() -> None:
    replies = replies_within(100)
    first = await enter(replies, "a", 50)
    waiting = [asyncio.create_task(enter(replies, "a", 60, is_kept=is_kept)) for is_kept in (False, True, True)]
    await turns()
    with pytest.raises(ResourceExhaustedError, match="100 bytes of replies are unread, and 60 wait to be sent"):
        await enter(replies, "b", 50, is_kept=False)
    first.end()
    for each in waiting:
        (await each).end()
    assert replies.used == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_connections_are_ended_by_the_names_of_their_clients(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as using:
        listener = using.enter_context(socket.socket(family))
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"there is no {host}")
        listener.listen()
        clients = [using.enter_context(socket.create_connection(listener.getsockname()[:2])) for _ in range(2)]
        for _ in clients:
            using.enter_context(listener.accept()[0])
        port = clients[0].getsockname()[1]
        shut_down(["ipv6:%5B::1%5D:" + str(port) if host == "::1" else f"ipv4:127.0.0.1:{port}"])
        assert clients[0].recv(1) == b""
        assert not is_ended(clients[1])
