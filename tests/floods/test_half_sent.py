"""Requests of which only a part arrives: they take a limited room, and end."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from pydantic import ByteSize

import gradserve
from gradserve_protocol.frames import FrameHeader, FrameKind
from gradserve_protocol.v1 import tensor_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import tensor_pb2
from gradserve_server.app import Server
from gradserve_server.config import LimitsConfig, RuntimeConfig, ServerConfig
from gradserve_server.tensors.payload import LOOKS, InFlight
from gradserve_testing import LocalServer
from tests.servers.announcing import announce, bulk_address
from tests.servers.frames import FrameClient, issue_ticket
from tests.servers.polling import PATIENCE_SECONDS, eventually, readable
from tests.servers.raw_http2 import DATA, END_STREAM, HELLO, connect, frame, headers, message, request_fields

MIB = 1 << 20
MAX_SLOW = 4
ROOM = MAX_SLOW * 4 * MIB
SLOW_BYTES = 3 * MIB
APPLY, PUT = "/gradserve.v1.AccumulatorService/ApplyGradient", "/gradserve.v1.TensorService/PutTensors"

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@contextlib.contextmanager
def serving(idle_seconds: float) -> Iterator[LocalServer]:
    limits = LimitsConfig(
        max_message_bytes=ByteSize(4 * MIB),
        max_queued_bytes=ByteSize(ROOM),
        max_inflight_bytes=ByteSize(ROOM),
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
        listener: Any = server.listener
        number: int = listener.traffic.requests.num_slow
        return number

    return local.inspect(look)


def half_a_request(path: str, stream: int, length: int = 3 * MIB) -> bytes:
    return headers(request_fields(path), stream) + frame(DATA, 0, stream, message(b"abc", length=length))


def num_arriving(local: LocalServer) -> int:
    return local.inspect(lambda server: server.sockets.context.messages.used)


@contextlib.contextmanager
def half_sent(local: LocalServer, path: str, count: int) -> Iterator[socket.socket]:
    """Sends the beginnings of requests over a connection of their own."""
    with connect(local.address) as connection:
        connection.sendall(HELLO + b"".join(half_a_request(path, stream) for stream in range(1, 2 * count, 2)))
        yield connection


def received(connection: socket.socket, wanted: bytes) -> None:
    """Waits until the server has sent some bytes."""
    connection.settimeout(PATIENCE_SECONDS)
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


STORE = b"gradserve.v1.TensorService.StoreTensors"
HEADERS = {
    "payload": FrameHeader(FrameKind.CALL, name_bytes=len(STORE), payload_bytes=SLOW_BYTES),
    "message": FrameHeader(FrameKind.CALL, name_bytes=len(STORE), message_bytes=SLOW_BYTES),
}


def used(local: LocalServer, kind: str) -> int:
    return local.inspect(lambda server: room(server, kind).used)


def room(server: Server, kind: str) -> InFlight:
    context = server.sockets.context
    return context.messages if kind == "message" else context.in_flight


def pass_seconds(local: LocalServer, kind: str) -> None:
    """Lets as much time pass for slow senders as decides about them."""
    for _ in range(LOOKS + 1):
        local.inspect(lambda server: room(server, kind).look())


def sender(local: LocalServer, using: contextlib.ExitStack, kind: str) -> FrameClient:
    """Sends the beginning of a call."""
    ticket = issue_ticket(local.address)
    client = using.enter_context(FrameClient.over_tcp(ticket))
    client.hello(ticket.ticket)
    client.send(HEADERS[kind], STORE + b"a")
    return client


@pytest.mark.parametrize("kind", HEADERS)
def test_who_sends_byte_by_byte_ends_when_others_need_the_room(patient: LocalServer, kind: str) -> None:
    with contextlib.ExitStack() as using:
        slow = [sender(patient, using, kind) for _ in range(ROOM // SLOW_BYTES)]
        eventually(lambda: used(patient, kind) >= len(slow) * SLOW_BYTES)
        pass_seconds(patient, kind)
        assert used(patient, kind) >= len(slow) * SLOW_BYTES, "nobody else wants it"
        prompt = sender(patient, using, kind)
        prompt.sock.sendall(bytes(SLOW_BYTES - 1))
        eventually(lambda: patient.inspect(lambda server: len(room(server, kind)._waiting)))
        for each in slow:
            each.sock.sendall(b"b")
        pass_seconds(patient, kind)
        for each in slow:
            status = each.receive().status
            assert (status.code, "less than 16384 bytes per second" in status.message) == (14, True)
        assert prompt.receive().header.code == 3  # its message is nonsense, and was read
    eventually(lambda: used(patient, kind) == 0)


def test_who_uploads_byte_by_byte_ends_when_others_need_the_room(patient: LocalServer) -> None:
    spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[ROOM])
    header = messages_pb2.PutTensorsRequest(header=messages_pb2.PutTensorsHeader(tensors=[spec]))
    chunk = messages_pb2.PutTensorsRequest(chunk=b"a").SerializeToString()
    with contextlib.ExitStack() as using:
        slow = using.enter_context(connect(patient.address))
        slow.sendall(HELLO + headers(request_fields(PUT)) + frame(DATA, 0, 1, message(header.SerializeToString())))
        eventually(lambda: used(patient, "payload") == ROOM)
        prompt = sender(patient, using, "payload")
        prompt.sock.sendall(bytes(SLOW_BYTES - 1))
        eventually(lambda: patient.inspect(lambda server: len(room(server, "payload")._waiting)))
        pass_seconds(patient, "payload")
        slow.sendall(frame(DATA, 0, 1, message(chunk)))

        def prompt_is_answered() -> bool:
            pass_seconds(patient, "payload")
            return bool(readable(prompt.sock, seconds=0))

        eventually(prompt_is_answered)  # once the byte has arrived
        received(slow, b"while others were waiting for the room")
    eventually(lambda: used(patient, "payload") == 0)


def stall(target: str, left: int) -> str:
    """Returns the address of a way to a server, for one connection, which carries so much of what the client sends."""
    listening = socket.create_server(("127.0.0.1", 0))

    def carry() -> None:
        nonlocal left
        with listening:
            client, _ = listening.accept()
        with client, connect(target) as server, contextlib.suppress(OSError):
            while True:
                ready = readable(*([server, client] if left else [server]))
                if client in ready:
                    server.sendall(sent := client.recv(min(left, 1 << 16)))
                    left -= len(sent)
                if server in ready:
                    if not (answer := server.recv(1 << 16)):
                        return
                    client.sendall(answer)

    threading.Thread(target=carry, daemon=True).start()
    return f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_client_that_is_too_slow_tries_again_behind_those_who_wait(patient: LocalServer) -> None:
    places = patient.server.socket_addresses.tcp
    stalling = stall(bulk_address(patient), MIB)
    array = np.zeros(ROOM, np.uint8)
    with ThreadPoolExecutor(2) as threads, contextlib.ExitStack() as using:
        announce(patient, tcp=[stalling])
        late = using.enter_context(gradserve.connect(patient.address, transport="bulk"))
        slow = threads.submit(late.put, array)
        eventually(lambda: used(patient, "payload") == ROOM)
        patient.server.socket_addresses.tcp = places
        prompt = using.enter_context(gradserve.connect(patient.address, transport="bulk"))
        others = threads.submit(prompt.put, array)
        eventually(lambda: patient.inspect(lambda server: len(room(server, "payload")._waiting)))
        assert not others.done()
        pass_seconds(patient, "payload")
        assert others.result(PATIENCE_SECONDS).shape == slow.result(PATIENCE_SECONDS).shape == (ROOM,)
    eventually(lambda: used(patient, "payload") == 0)


def test_a_stream_of_reflection_that_asks_nothing_ends() -> None:
    with serving(0.3) as local, connect(local.address) as connection:
        connection.sendall(HELLO + headers(request_fields(REFLECTION)))
        received(connection, b"the request did not arrive within 0.3 s")
