"""Tensors that are read and released count until the reply has left, or cannot leave any more; then they are gone."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grpc
import numpy as np
import pytest

from gradserve_protocol.frames import HEADER_BYTES, FrameHeader
from gradserve_protocol.v1 import tensor_messages_pb2
from gradserve_server.app import Server
from gradserve_server.config import LimitsConfig, ServerConfig
from gradserve_testing import LocalServer
from tests.servers.frames import FrameClient, issue_ticket
from tests.servers.polling import PATIENCE_SECONDS, eventually
from tests.servers.runtime import NOT_WARMED_UP
from tests.tensors.keeping import keep_now

NUM_BYTES = 24 << 20
"""More than the buffers of a connection hold."""


class OnSocket:
    """A client that reads a tensor over a socket, when the test says so."""

    def __init__(self, server: LocalServer, way: str) -> None:
        ticket = issue_ticket(server.address)
        self._client = FrameClient.over_tcp(ticket) if way == "bulk" else FrameClient.over_unix(ticket)
        assert self._client.hello(ticket.ticket).header.code == 0

    def begin(self, request: tensor_messages_pb2.ReadTensorsRequest) -> None:
        self._client.call("TensorService.ReadTensors", request)
        self._header = FrameHeader.unpack(self._client.sock.recv(HEADER_BYTES))
        assert self._header.code == 0

    def finish(self) -> None:
        left = self._header.head_bytes + self._header.payload_bytes
        while left:
            left -= len(self._client.sock.recv(left))

    def leave(self) -> None:
        self._client.sock.close()


class OnGrpc:
    """A client that reads a tensor over gRPC, and takes its message from the connection when the test says so.

    A message that was not asked for waits for gRPC's flow control; only calls of streams need not ask for it.
    """

    def __init__(self, server: LocalServer) -> None:
        self._channel = grpc.insecure_channel(server.address, options=[("grpc.max_receive_message_length", -1)])

    def begin(self, request: tensor_messages_pb2.ReadTensorsRequest) -> None:
        path = "/gradserve.v1.TensorService/ReadTensors"
        method: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(path)
        self._replies: Any = method(request.SerializeToString(), timeout=PATIENCE_SECONDS)

    def finish(self) -> None:
        (reply,) = self._replies
        assert len(reply) > NUM_BYTES

    def leave(self) -> None:
        self._channel.close()


Reader: TypeAlias = OnSocket | OnGrpc

READERS: dict[str, Callable[[LocalServer], Reader]] = {
    "bulk": lambda server: OnSocket(server, "bulk"),
    "shared_memory": lambda server: OnSocket(server, "shared_memory"),
    "grpc": OnGrpc,
}


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """A server of this file alone, as its use is measured."""
    limits = LimitsConfig.model_validate({"max_message_bytes": 2 * NUM_BYTES})
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP, limits=limits)) as local:
        yield local


def used(server: LocalServer) -> tuple[int, int, int]:
    """Returns the number of tensors that can be found, and the used parts of the budgets."""
    return server.inspect(lambda each: (len(each.store), each.usage.memory.used, each.store._handles.used))


@pytest.fixture
def handle(server: LocalServer) -> str:
    def keep(each: Server) -> str:
        return keep_now(each.store, [np.zeros(NUM_BYTES, np.uint8)], None, shared=False)[0]

    return server.inspect(keep)


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, server: LocalServer, handle: str) -> Iterator[Reader]:
    """Has begun to read a tensor that only it may read."""
    made = READERS[request.param](server)
    made.begin(tensor_messages_pb2.ReadTensorsRequest(handles=[handle], release=True))
    yield made
    made.leave()


@pytest.mark.parametrize("end", ["finish", "leave"])
def test_it_counts_until_the_reply_has_left(reader: Reader, server: LocalServer, end: str) -> None:
    assert eventually(lambda: used(server), lambda use: use[0] == 0) == (0, NUM_BYTES, 1)
    getattr(reader, end)()
    eventually(lambda: used(server), (0, 0, 0).__eq__)


@pytest.mark.parametrize("end", ["finish", "leave"])
def test_it_can_be_deleted_while_it_is_read(reader: Reader, server: LocalServer, handle: str, end: str) -> None:
    """As by a client that gives up, whose request to delete it arrives before the end of the call that reads it."""
    eventually(lambda: used(server), lambda use: use[0] == 0)
    assert [server.inspect(lambda each: each.store.delete([handle])) for _ in range(2)] == [1, 0]
    assert used(server) == (0, NUM_BYTES, 1)
    getattr(reader, end)()
    eventually(lambda: used(server), (0, 0, 0).__eq__)


def test_what_a_ticket_does_not_allow_to_read_stays(server: LocalServer) -> None:
    (handle,) = server.inspect(lambda each: keep_now(each.store, [np.zeros(1 << 20, np.uint8)], None, shared=False))
    ticket = issue_ticket(server.address, num_bytes=1 << 19)
    with FrameClient.over_tcp(ticket) as client:
        assert client.hello(ticket.ticket).header.code == 0
        request = tensor_messages_pb2.ReadTensorsRequest(handles=[handle], release=True)
        client.call("TensorService.ReadTensors", request)
        assert client.receive().header.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert used(server) == (1, 1 << 20, 1)
    assert server.inspect(lambda each: each.store.delete([handle])) == 1
