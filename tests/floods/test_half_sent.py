"""Requests of which only a part arrives: they take a limited room, and end."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ByteSize

import gradserve
from gradserve.wire.frames import FrameHeader, FrameKind
from gradserve_server.app import Server
from gradserve_server.config import LimitsConfig, RuntimeConfig, ServerConfig
from gradserve_server.testing import LocalServer
from tests.servers.frames import FrameClient, issue_ticket
from tests.servers.polling import eventually
from tests.servers.raw_http2 import DATA, END_STREAM, HELLO, connect, frame, headers, message, request_fields

MIB = 1 << 20
MAX_SLOW = 4
APPLY, PUT = "/gradserve.v1.AccumulatorService/ApplyGradient", "/gradserve.v1.TensorService/PutTensors"

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@contextlib.contextmanager
def serving(idle_seconds: float) -> Iterator[LocalServer]:
    limits = LimitsConfig(
        max_message_bytes=ByteSize(4 * MIB),
        max_queued_bytes=ByteSize(MAX_SLOW * 4 * MIB),
        message_idle_seconds=idle_seconds,
    )
    with LocalServer(ServerConfig(limits=limits, runtime=RuntimeConfig(warm_up=False))) as local:
        yield local


@pytest.fixture(scope="module")
def patient() -> Iterator[LocalServer]:
    with serving(60.0) as local:
        yield local


def num_slow(local: LocalServer) -> int:
    def look(server: Server) -> int:
        listener: Any = server._listener
        number: int = listener.traffic.requests.num_slow
        return number

    return local.inspect(look)


def half_a_request(path: str, stream: int, length: int = 3 * MIB) -> bytes:
    return headers(request_fields(path), stream) + frame(DATA, 0, stream, message(b"abc", length=length))


def num_arriving(local: LocalServer) -> int:
    return local.inspect(lambda server: server._sockets._context.messages.used)


@contextlib.contextmanager
def half_sent(local: LocalServer, path: str, count: int) -> Iterator[socket.socket]:
    """Sends the beginnings of requests over a connection of their own."""
    with connect(local.address) as connection:
        connection.sendall(HELLO + b"".join(half_a_request(path, stream) for stream in range(1, 2 * count, 2)))
        yield connection


def received(connection: socket.socket, wanted: bytes) -> None:
    """Waits until the server has sent some bytes."""
    connection.settimeout(60)
    data = b""
    while wanted not in data:
        more = connection.recv(1 << 16)
        assert more, data
        data += more


@pytest.mark.parametrize("path", [APPLY, PUT])
def test_half_sent_requests_end(path: str) -> None:
    with serving(0.3) as local, half_sent(local, path, 3) as connection:
        received(connection, b"the request did not arrive within 0.3 s")
        eventually(lambda: num_slow(local) == 0)


def test_only_some_requests_may_arrive_slowly(patient: LocalServer) -> None:
    with half_sent(patient, APPLY, 20) as connection:
        received(connection, b"more than 4 requests arrive slowly")
        eventually(lambda: num_slow(patient) == MAX_SLOW)
        with gradserve.connect(patient.address, transport="grpc") as client:
            assert client.server_info().version  # what arrives at once is not limited
    eventually(lambda: num_slow(patient) == 0)


def test_who_has_most_loses_one_to_another_client(patient: LocalServer) -> None:
    with half_sent(patient, APPLY, MAX_SLOW) as greedy:
        eventually(lambda: num_slow(patient) == MAX_SLOW)
        with connect(patient.address) as modest:
            modest.sendall(HELLO + half_a_request(APPLY, 1, length=6))
            received(greedy, b"more than 4 requests arrive slowly")
            modest.sendall(frame(DATA, END_STREAM, 1, b"def"))
            received(modest, b"the message is not valid protobuf")
    eventually(lambda: num_slow(patient) == 0)


def test_long_messages_on_sockets_take_turns(patient: LocalServer) -> None:
    name = b"gradserve.v1.AccumulatorService.ApplyGradient"
    header = FrameHeader(FrameKind.CALL, name_bytes=len(name), message_bytes=3 * MIB)
    with contextlib.ExitStack() as using:
        for _ in range(7):
            client = using.enter_context(FrameClient.over_tcp(issue_ticket(patient.address)))
            client.hello(issue_ticket(patient.address).ticket)
            client.send(header, name + bytes(1000))
        eventually(lambda: num_arriving(patient) == 5 * header.head_bytes)  # there is no room for the others
        with gradserve.connect(patient.address) as client_of_others:
            assert client_of_others.server_info().version
        assert num_arriving(patient) == 5 * header.head_bytes
    eventually(lambda: num_arriving(patient) == 0)


def test_a_stream_of_reflection_that_asks_nothing_ends() -> None:
    with serving(0.3) as local, connect(local.address) as connection:
        connection.sendall(HELLO + headers(request_fields(REFLECTION)))
        received(connection, b"the request did not arrive within 0.3 s")
