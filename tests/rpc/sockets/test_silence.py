"""Connections that fall silent in the middle of a frame, or do not read: the server waits for none of them for long."""

import contextlib

import grpc
import numpy as np
import pytest

from gradserve_protocol.frames import FrameHeader, FrameKind
from gradserve_testing import LocalServer
from tests.rpc.sockets.conftest import MIB, Connect, use_of
from tests.rpc.sockets.test_broken_rules import Read, answers, call_frame, hello_frame, refused, store
from tests.rpc.sockets.test_strands import rope_of
from tests.servers.polling import eventually

DEADLINE = grpc.StatusCode.DEADLINE_EXCEEDED
SILENT = "the connection was silent for more than 0.5 s"


@pytest.fixture(scope="module")
def idle_seconds() -> float:
    return 0.5


@pytest.mark.parametrize(
    "data", [b"\1" * 7, hello_frame(b"abc", message_bytes=5)], ids=["half a header", "half a message"]
)
def test_before_the_hello(connect: Connect, data: bytes) -> None:
    with connect(hello=False) as client:
        client.sock.sendall(data)
        refused(client, DEADLINE, SILENT)


HALVES = {
    "a header": FrameHeader(FrameKind.CALL).pack()[:31],
    "a name": call_frame()[:40],
    "a message": call_frame(rest=b"abc", message_bytes=MIB),
    "a small payload": call_frame(rest=b"abc", payload_bytes=64),
    "a large payload": call_frame(rest=bytes(100), payload_bytes=MIB),
    "a payload of 2^63": call_frame(rest=bytes(100), payload_bytes=(1 << 63) - 1),
}


@pytest.mark.parametrize("data", list(HALVES.values()), ids=list(HALVES))
def test_in_the_middle_of_a_call(connect: Connect, data: bytes) -> None:
    with connect() as client, connect() as other:
        client.sock.sendall(data)
        refused(client, DEADLINE, SILENT)
        assert answers(other)


@pytest.mark.usefixtures("unused")
def test_one_strand_of_several(server: LocalServer) -> None:
    with rope_of(server, 2) as rope, contextlib.closing(rope.strands.pop().sock):
        rope.send_split(np.zeros(MIB, np.float32), 2)
        assert rope.main.receive().header.code == DEADLINE.value[0]


def test_a_client_that_does_not_read_is_left(connect: Connect, server: LocalServer) -> None:
    array = np.zeros(4 * MIB, np.float32)
    with connect() as client, connect() as lazy:
        handle = store(client, array)
        lazy.call("TensorService.ReadTensors", Read(handles=[handle], release=True))
        eventually(lambda: use_of(server).connections, (1).__eq__)
