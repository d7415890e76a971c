"""Strands: payloads that are split over several sockets, and sockets that may not become strands."""

import contextlib
from collections.abc import Iterator, Sequence

import grpc
import numpy as np
import pytest

from gradserve_protocol.frames import MAX_STRANDS, MIN_SPLIT_BYTES, PROTOCOL, FrameHeader, FrameKind, shares, split
from gradserve_protocol.tensors import Contents
from gradserve_protocol.v1 import server_messages_pb2, tensor_messages_pb2
from gradserve_protocol.v1 import socket_messages_pb2 as messages_pb2
from gradserve_server.config import LimitsConfig, ServerConfig
from gradserve_testing import LocalServer
from tests.rpc.sockets.conftest import LIMITS, MIB, use_of
from tests.servers.frames import FrameClient, issue_ticket
from tests.servers.polling import eventually
from tests.servers.runtime import NOT_WARMED_UP

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
DEADLINE, EXHAUSTED = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED
STORE = b"gradserve.v1.TensorService.StoreTensors"


@pytest.mark.parametrize(
    ("num_bytes", "num_strands", "expected"),
    [
        (0, 3, [0]),
        (MIN_SPLIT_BYTES - 1, 3, [MIN_SPLIT_BYTES - 1]),
        (MIN_SPLIT_BYTES, 0, [MIN_SPLIT_BYTES]),
        (MIN_SPLIT_BYTES, 3, [MIN_SPLIT_BYTES // 4] * 4),
        (MIN_SPLIT_BYTES + 1, 1, [MIN_SPLIT_BYTES // 2 + 64, MIN_SPLIT_BYTES // 2 - 63]),
        (MIN_SPLIT_BYTES + 200, 15, [65600] * 15 + [65600 - 824]),
    ],
)
def test_shares(num_bytes: int, num_strands: int, expected: Sequence[int]) -> None:
    assert shares(num_bytes, num_strands) == expected


@pytest.mark.parametrize("sizes", [[3 * MIB], [1, 0, MIB, 5, 2 * MIB, 70], [100_000] * 11])
@pytest.mark.parametrize("num_strands", [1, 2, MAX_STRANDS])
def test_parts_hold_all_bytes_in_order(sizes: Sequence[int], num_strands: int) -> None:
    data = np.random.default_rng(0).bytes(sum(sizes))
    ends = np.cumsum(sizes)
    parts = split([data[end - size : end] for end, size in zip(ends, sizes, strict=True)], num_strands)
    assert b"".join(bytes(buffer) for part in parts for buffer in part) == data
    assert [sum(map(len, part)) for part in parts] == shares(len(data), num_strands)


class Rope:
    """A connection with strands."""

    def __init__(self, server: LocalServer, num_strands: int) -> None:
        self.ticket = issue_ticket(server.address)
        self.main = FrameClient.over_tcp(self.ticket)
        welcome = self.main.hello(self.ticket.ticket)
        assert welcome.header.code == 0
        self.key = messages_pb2.Welcome.FromString(welcome.message).strand_key
        self.strands = [self.strand(number + 1) for number in range(num_strands)]

    def strand(self, number: int) -> FrameClient:
        """Opens a strand, which must be welcome."""
        client, code = self.ask(self.key, number)
        assert code == 0
        return client

    def ask(self, key: bytes, number: int, rest: bytes = b"") -> tuple[FrameClient, int]:
        """Opens a socket that asks to become a strand; returns it, and the code of the answer."""
        client = FrameClient.over_tcp(self.ticket)
        client.sock.sendall(hello_frame(key, number) + rest)
        return client, client.receive().header.code

    def close(self) -> None:
        for each in (self.main, *self.strands):
            each.sock.close()

    def send_split(self, array: np.ndarray[tuple[int, ...], np.dtype[np.float32]], num_strands: int) -> None:
        """Stores an array, whose bytes go over strands."""
        contents = Contents()
        request = tensor_messages_pb2.StoreTensorsRequest(tensors=[contents.tensor(array)]).SerializeToString()
        header = FrameHeader(
            FrameKind.CALL,
            num_strands,
            name_bytes=len(STORE),
            message_bytes=len(request),
            payload_bytes=contents.num_bytes,
        )
        own, *others = split(contents.pieces(), num_strands)
        self.main.sock.sendall(header.pack() + STORE + request + b"".join(own))
        for strand, part in zip(self.strands, others, strict=False):
            strand.sock.sendall(b"".join(part))

    def info(self) -> str:
        """Makes a call that has no payload."""
        self.main.call("ServerService.GetServerInfo", server_messages_pb2.GetServerInfoRequest())
        return self.main.answer(server_messages_pb2.GetServerInfoResponse)[0].version


def hello_frame(key: bytes, number: int) -> bytes:
    message = messages_pb2.Hello(strand_key=key, strand=number).SerializeToString()
    return FrameHeader(FrameKind.HELLO, message_bytes=len(message), number=PROTOCOL).pack() + message


@contextlib.contextmanager
def rope_of(server: LocalServer, num_strands: int) -> Iterator[Rope]:
    rope = Rope(server, num_strands)
    try:
        yield rope
    finally:
        rope.close()


@pytest.mark.usefixtures("unused")
def test_payloads_are_split_both_ways(server: LocalServer) -> None:
    array = np.random.default_rng(1).normal(size=MIB + 7).astype(np.float32)
    with rope_of(server, 3) as rope:
        rope.send_split(array, 2)
        response, _ = rope.main.answer(tensor_messages_pb2.StoreTensorsResponse)
        request = tensor_messages_pb2.ReadTensorsRequest(handles=[response.tensors[0].handle], release=True)
        message, name = request.SerializeToString(), b"gradserve.v1.TensorService.ReadTensors"
        header = FrameHeader(FrameKind.CALL, 3, name_bytes=len(name), message_bytes=len(message))
        rope.main.sock.sendall(header.pack() + name + message)
        answer = FrameHeader.unpack(rope.main._exactly(32))
        rope.main._exactly(answer.head_bytes)
        sizes = shares(answer.payload_bytes, 3)
        parts = [client._exactly(size) for client, size in zip((rope.main, *rope.strands), sizes, strict=True)]
        assert b"".join(parts) == array.tobytes()
        assert rope.info()


REFUSED = {
    "an unknown key": (b"k" * 16, 1, b"", NOT_FOUND),
    "a short key": (b"k", 1, b"", NOT_FOUND),
    "number 0": (None, 0, b"", INVALID),
    "a negative number": (None, -1, b"", INVALID),
    "number 16": (None, 16, b"", INVALID),
    "a number that is taken": (None, 2, b"", INVALID),
    "bytes before the welcome": (None, 3, b"early", INVALID),
}


@pytest.mark.usefixtures("unused")
@pytest.mark.parametrize(("key", "number", "rest", "code"), list(REFUSED.values()), ids=list(REFUSED))
def test_sockets_that_do_not_become_strands(
    server: LocalServer, key: bytes | None, number: int, rest: bytes, code: grpc.StatusCode
) -> None:
    with rope_of(server, 2) as rope:
        client, refused = rope.ask(key or rope.key, number, rest)
        with client:
            assert refused == code.value[0]
            assert client.is_closed_by_server()
        assert rope.info()


@pytest.mark.usefixtures("unused")
def test_a_key_ends_with_its_connection(server: LocalServer) -> None:
    with rope_of(server, 0) as rope:
        before = use_of(server).connections
        rope.main.sock.close()
        eventually(lambda: use_of(server).connections, lambda count: count < before)
        client, code = rope.ask(rope.key, 1)
        with client:
            assert code == NOT_FOUND.value[0]


def test_strands_are_limited_like_connections_and_counted_until_they_end() -> None:
    limits = LimitsConfig(max_connections=3)
    with LocalServer(ServerConfig(limits=limits, runtime=NOT_WARMED_UP)) as server, rope_of(server, 3) as rope:

        def num_strands() -> int:
            return server.inspect(lambda running: running.sockets.context.fair.strands.used)

        assert num_strands() == 3
        client, code = rope.ask(rope.key, 4)
        with client:
            assert code == EXHAUSTED.value[0]
            assert client.is_closed_by_server()
        rope.main.sock.close()
        eventually(num_strands, (0).__eq__)


@pytest.mark.usefixtures("unused")
def test_a_unix_socket_is_no_strand(server: LocalServer) -> None:
    with rope_of(server, 0) as rope, FrameClient.over_unix(rope.ticket) as client:
        client.sock.sendall(hello_frame(rope.key, 1))
        assert client.receive().header.code == INVALID.value[0]


@pytest.mark.usefixtures("unused")
@pytest.mark.parametrize("num_strands", [3, 255])
def test_a_call_over_strands_that_are_not_open(server: LocalServer, num_strands: int) -> None:
    with rope_of(server, 2) as rope:
        rope.main.send(FrameHeader(FrameKind.CALL, num_strands, name_bytes=len(STORE), payload_bytes=MIB))
        frame = rope.main.receive()
        assert frame.header.code == INVALID.value[0]
        assert "strand 3 is not" in frame.status.message


@pytest.mark.usefixtures("unused")
def test_a_payload_that_does_not_fit_is_dropped_on_all_strands(server: LocalServer) -> None:
    with rope_of(server, 2) as rope:
        rope.send_split(np.zeros(LIMITS.max_bytes // 4 + 1, np.float32), 2)
        assert rope.main.receive().header.code == EXHAUSTED.value[0]
        rope.send_split(np.ones(MIB, np.float32), 2)
        response, _ = rope.main.answer(tensor_messages_pb2.StoreTensorsResponse)
        handles = [response.tensors[0].handle]
        rope.main.call("TensorService.DeleteTensors", tensor_messages_pb2.DeleteTensorsRequest(handles=handles))
        rope.main.answer(tensor_messages_pb2.DeleteTensorsResponse)


@pytest.mark.usefixtures("unused")
def test_a_strand_that_breaks_ends_the_connection(server: LocalServer) -> None:
    with rope_of(server, 2) as rope:
        rope.strands.pop().sock.close()
        with contextlib.suppress(ConnectionError):  # the server may end the connection before all is sent
            rope.send_split(np.zeros(MIB, np.float32), 2)
        assert rope.main.is_closed_by_server()
