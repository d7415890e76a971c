"""Connections that break the rules: each ends with an error of its own, and leaves nothing behind."""

import socket
import struct
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

import gradserve
from gradserve_protocol.frames import PROTOCOL, FrameHeader, FrameKind, Segment, pack_segments
from gradserve_protocol.tensors import Contents
from gradserve_protocol.v1 import accumulator_messages_pb2, accumulator_pb2, server_messages_pb2, tensor_messages_pb2
from gradserve_protocol.v1 import socket_messages_pb2 as messages_pb2
from gradserve_server.app import Server
from gradserve_testing import LocalServer
from tests.rpc.sockets.conftest import LIMITS, MIB, Connect, connector, use_of
from tests.servers.frames import FrameClient, issue_ticket
from tests.servers.polling import eventually
from tests.servers.raw_calls import RawCalls

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
DEADLINE, EXHAUSTED = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED
UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED
Info, Store, Read = (
    server_messages_pb2.GetServerInfoRequest,
    tensor_messages_pb2.StoreTensorsRequest,
    tensor_messages_pb2.ReadTensorsRequest,
)
INFO = b"gradserve.v1.ServerService.GetServerInfo"


def refused(client: FrameClient, code: grpc.StatusCode, message: str) -> None:
    """Checks that the server answers with an error, and closes the connection."""
    frame = client.receive()
    assert frame.header.kind is FrameKind.REPLY
    assert frame.header.code == frame.status.code == code.value[0], frame.status
    assert message in frame.status.message
    assert client.is_closed_by_server()


def answers(client: FrameClient) -> bool:
    client.call("ServerService.GetServerInfo", Info())
    response, _ = client.answer(server_messages_pb2.GetServerInfoResponse)
    return bool(response.version)


def hello_frame(message: bytes, **fields: int) -> bytes:
    header = {"message_bytes": len(message), "number": PROTOCOL, **fields}
    return FrameHeader(FrameKind.HELLO, **header).pack() + message


def call_frame(name: bytes = INFO, rest: bytes = b"", **fields: int) -> bytes:
    return FrameHeader(FrameKind.CALL, name_bytes=len(name), **fields).pack() + name + rest


GARBAGE_HELLOS: dict[str, tuple[bytes, grpc.StatusCode, str]] = {
    "an HTTP request": (b"GET / HTTP/1.1\r\nHost: example.org\r\n", INVALID, "expected a known kind of frame, got 71"),
    "zeros": (bytes(32), INVALID, "expected a known kind of frame, got 0"),
    "ones": (b"\xff" * 32, INVALID, "expected a known kind of frame, got 255"),
    "a call": (call_frame(), INVALID, "expected HELLO as the first frame"),
    "another protocol": (hello_frame(b"", number=1), INVALID, "expected HELLO as the first frame"),
    "with a payload": (hello_frame(b"", payload_bytes=1 << 63), INVALID, "a short message and nothing else"),
    "with a name": (hello_frame(b"", name_bytes=3), INVALID, "a short message and nothing else"),
    "with a long message": (hello_frame(b"", message_bytes=1 << 31), INVALID, "a short message and nothing else"),
    "no message": (hello_frame(b"\xff\xff"), INVALID, "expected a Hello"),
    "text that is not UTF-8": (hello_frame(b"\x12\x02\xff\xfe"), INVALID, "expected a Hello"),
    "empty": (hello_frame(b""), NOT_FOUND, "no such ticket"),
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("data", "code", "message"), list(GARBAGE_HELLOS.values()), ids=list(GARBAGE_HELLOS))
def test_hellos_that_are_none(connect: Connect, data: bytes, code: grpc.StatusCode, message: str) -> None:
    with connect(hello=False) as client:
        client.sock.sendall(data)
        refused(client, code, message)


def test_a_ticket_is_good_for_one_connection(connect: Connect, server: LocalServer) -> None:
    ticket = issue_ticket(server.address).ticket
    with connect(hello=False) as first, connect(hello=False) as second:
        assert first.hello(ticket).header.code == 0
        frame = second.hello(ticket)
        assert frame.header.code == NOT_FOUND.value[0]
        assert second.is_closed_by_server()
        assert answers(first)


def test_a_ticket_of_another_client(connect: Connect, server: LocalServer) -> None:
    ticket = issue_ticket(server.address, client_id="somebody else").ticket
    for name in ("somebody", "somebody else"):
        with connect(hello=False) as client:
            assert client.hello(ticket, name).header.code == NOT_FOUND.value[0], "a try spends it"


def test_a_ticket_of_another_server(connect: Connect) -> None:
    with LocalServer() as other, connect(hello=False) as client:
        ticket = issue_ticket(other.address).ticket
        assert client.hello(ticket).header.code == NOT_FOUND.value[0]
        assert client.is_closed_by_server()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"client_id": ""}, "client_id"),
        ({"client_id": "x" * 257}, "client_id"),
        ({"client_id": "x", "direction": 4}, "direction"),
        ({"client_id": "x", "num_bytes": -1}, "num_bytes"),
    ],
)
def test_tickets_that_are_not_issued(raw: RawCalls, fields: dict[str, Any], field: str) -> None:
    failure = raw.fail("IssueTicket", messages_pb2.IssueTicketRequest(**fields))
    assert (failure.code, failure.field) == (INVALID, field)


@pytest.mark.usefixtures("connect")
def test_hello_again(connect: Connect, server: LocalServer) -> None:
    with connect() as client:
        message = messages_pb2.Hello(ticket=issue_ticket(server.address).ticket, client_id="somebody")
        client.sock.sendall(hello_frame(message.SerializeToString()))
        refused(client, INVALID, "expected a call, got HELLO")


BROKEN_FRAMES: dict[str, tuple[bytes, grpc.StatusCode, str]] = {
    "an answer": (FrameHeader(FrameKind.REPLY).pack(), INVALID, "expected a call, got REPLY"),
    "an unknown kind": (bytes([9]) * 32, INVALID, "expected a known kind of frame, got 9"),
    "a region without a descriptor": (
        FrameHeader(FrameKind.REGION, number=1, size=4096).pack(),
        INVALID,
        "expected REGION with a descriptor, over a Unix socket",
    ),
    "a region with a payload": (
        FrameHeader(FrameKind.REGION, number=1, size=4096, payload_bytes=1).pack(),
        INVALID,
        "expected REGION to be a header and nothing else",
    ),
    "an unknown region dropped": (
        FrameHeader(FrameKind.DROP, number=1).pack(),
        INVALID,
        "expected the number of a region, got 1",
    ),
    "a drop with a message": (
        FrameHeader(FrameKind.DROP, number=1, message_bytes=5).pack(),
        INVALID,
        "expected DROP to be a header and nothing else",
    ),
    "a release of what is not read": (
        FrameHeader(FrameKind.RELEASE, number=1, size=1).pack(),
        INVALID,
        "expected 1 to 0 reads of region 1 to end, got 1",
    ),
    "a release of nothing": (FrameHeader(FrameKind.RELEASE, number=1).pack(), INVALID, "got 0"),
    "a release with a name": (
        FrameHeader(FrameKind.RELEASE, number=1, size=1, name_bytes=5).pack(),
        INVALID,
        "expected RELEASE to be a header and nothing else",
    ),
    "a long name": (
        FrameHeader(FrameKind.CALL, name_bytes=1025).pack(),
        INVALID,
        "a name of at most 1024 bytes, got 1025",
    ),
    "a long message": (
        FrameHeader(FrameKind.CALL, message_bytes=(1 << 32) - 1).pack(),
        EXHAUSTED,
        f"the message has {(1 << 32) - 1} bytes, at most {LIMITS.max_message_bytes} are allowed",
    ),
    "too many segments": (
        FrameHeader(FrameKind.CALL, size=1 << 63).pack(),
        INVALID,
        "expected at most 262144 segments",
    ),
    "a payload above what any ticket allows": (
        call_frame(payload_bytes=1 << 63),
        INVALID,
        f"expected a payload of at most {(1 << 63) - 1} bytes, as the ticket says",
    ),
    "an unknown region": (
        call_frame(rest=pack_segments([Segment(0, 8, 5, 0)]), size=1),
        INVALID,
        "expected the number of a region, got 5",
    ),
    "a segment beyond the frame": (
        call_frame(rest=pack_segments([Segment(0, 65, 0, 0)]), size=1, payload_bytes=64),
        INVALID,
        "expected a segment within the 64 bytes of the frame",
    ),
    "segments that overlap": (
        call_frame(rest=pack_segments([Segment(0, 65, 1, 0), Segment(64, 8, 1, 0)]), size=2),
        INVALID,
        "expected segments in order that do not overlap",
    ),
}


@pytest.mark.parametrize(("data", "code", "message"), list(BROKEN_FRAMES.values()), ids=list(BROKEN_FRAMES))
def test_frames_that_break_the_rules(connect: Connect, data: bytes, code: grpc.StatusCode, message: str) -> None:
    with connect() as client, connect() as other:
        client.sock.sendall(data)
        refused(client, code, message)
        assert answers(other)


@pytest.mark.parametrize(("direction", "num_bytes", "allowed"), [(0, 1000, 1000), (2, 1000, 1000), (3, 0, 0)])
def test_payloads_that_the_ticket_does_not_allow(
    connect: Connect, direction: int, num_bytes: int, allowed: int
) -> None:
    with connect(direction=direction, num_bytes=num_bytes) as client:
        client.sock.sendall(call_frame(rest=bytes(allowed), payload_bytes=allowed))
        assert client.receive().header.code == 0
        client.sock.sendall(call_frame(payload_bytes=allowed + 1))
        refused(client, INVALID, f"expected a payload of at most {allowed} bytes, as the ticket says")


def store(client: FrameClient, array: NDArray[Any]) -> str:
    contents = Contents()
    client.call("TensorService.StoreTensors", Store(tensors=[contents.tensor(array)]), contents)
    response, _ = client.answer(tensor_messages_pb2.StoreTensorsResponse)
    return response.tensors[0].handle


def test_results_that_the_ticket_does_not_allow(connect: Connect, raw: RawCalls) -> None:
    array = np.arange(MIB // 4, dtype=np.float32)
    with connect() as client, connect(direction=2) as sender, connect(direction=3, num_bytes=MIB - 1) as reader:
        handle = store(client, array)
        sender.call("TensorService.ReadTensors", Read(handles=[handle]))
        response, frame = sender.answer(tensor_messages_pb2.ReadTensorsResponse)
        assert frame.payload == b"", "replies carry no payload"
        assert response.tensors[0].content == array.tobytes()
        reader.call("TensorService.ReadTensors", Read(handles=[handle]))
        frame = reader.receive()
        assert frame.header.code == EXHAUSTED.value[0]
        assert f"the result has {MIB} bytes, at most {MIB - 1} are allowed by the ticket" in frame.status.message
        assert answers(reader)
        client.call("TensorService.ReadTensors", Read(handles=[handle], release=True))
        _, frame = client.answer(tensor_messages_pb2.ReadTensorsResponse)
        assert frame.payload == array.tobytes()


def test_more_than_a_message_comes_as_payload_only(connect: Connect) -> None:
    array = np.zeros(LIMITS.max_message_bytes + 4, np.uint8)
    with connect() as client, connect(direction=2) as sender:
        handle = store(client, array)
        sender.call("TensorService.ReadTensors", Read(handles=[handle]))
        frame = sender.receive()
        assert frame.header.code == EXHAUSTED.value[0]
        assert "use GetTensors" in frame.status.message
        client.call("TensorService.ReadTensors", Read(handles=[handle], release=True))
        client.answer(tensor_messages_pb2.ReadTensorsResponse)


NOT_HERE = [
    "TensorService.PutTensors",
    "TensorService.GetTensors",
    "SocketService.IssueTicket",
    "LeaseService.HoldClientLease",
    "TensorService.Nothing",
    "",
    "\N{SNOWMAN}",
]


@pytest.mark.parametrize("method", NOT_HERE)
@pytest.mark.parametrize("payload_bytes", [0, 3 * MIB])
def test_methods_that_no_socket_has(connect: Connect, method: str, payload_bytes: int) -> None:
    name = f"gradserve.v1.{method}"
    with connect() as client:
        client.sock.sendall(call_frame(name.encode(), bytes(payload_bytes), payload_bytes=payload_bytes))
        frame = client.receive()
        assert frame.header.code == UNIMPLEMENTED.value[0]
        assert frame.status.message == f"no method {name!r} on this socket of gradserve {gradserve.__version__}"
        assert answers(client)


def test_a_name_that_is_no_text(connect: Connect) -> None:
    with connect() as client:
        client.sock.sendall(call_frame(b"\xff\xfe"))
        assert client.receive().header.code == UNIMPLEMENTED.value[0]
        assert answers(client)


@pytest.mark.parametrize("num_bytes", [LIMITS.max_bytes + 1, LIMITS.max_bytes * 2])
def test_a_payload_larger_than_all_memory_is_dropped(connect: Connect, num_bytes: int) -> None:
    with connect() as client:
        client.sock.sendall(call_frame(rest=bytes(num_bytes), payload_bytes=num_bytes))
        frame = client.receive()
        assert frame.header.code == EXHAUSTED.value[0]
        assert f"{num_bytes} asked for" in frame.status.message
        assert answers(client)


def test_what_can_never_fit_keeps_nobody_waiting(connect: Connect, server: LocalServer) -> None:
    with connect() as greedy, connect() as client:
        greedy.sock.sendall(call_frame(payload_bytes=1 << 62))
        handle = store(client, np.zeros(MIB))
        client.call("TensorService.DeleteTensors", tensor_messages_pb2.DeleteTensorsRequest(handles=[handle]))
        assert client.receive().header.code == 0


def test_payloads_wait_for_their_turn(connect: Connect, server: LocalServer) -> None:
    size = LIMITS.max_inflight_bytes // 2 + 1
    array = np.zeros(size, np.uint8)
    contents = Contents()
    request = Store(tensors=[contents.tensor(array)]).SerializeToString()
    frame = call_frame(b"gradserve.v1.TensorService.StoreTensors", message_bytes=len(request), payload_bytes=size)
    with connect() as first, connect() as second:
        first.sock.sendall(frame + request + bytes(size - 1))
        eventually(lambda: use_of(server).in_flight, size.__eq__)
        second.sock.setblocking(True)
        second.sock.sendall(frame + request)
        second.sock.sendall(bytes(1000))
        assert use_of(server).in_flight == size, "the second one waits"
        first.sock.sendall(b"\0")
        stored, _ = first.answer(tensor_messages_pb2.StoreTensorsResponse)
        second.sock.sendall(bytes(size - 1000))
        also, _ = second.answer(tensor_messages_pb2.StoreTensorsResponse)
        handles = [stored.tensors[0].handle, also.tensors[0].handle]
        first.call("TensorService.DeleteTensors", tensor_messages_pb2.DeleteTensorsRequest(handles=handles))
        assert first.receive().header.code == 0


def test_a_payload_that_no_tensor_is_in_keeps_nobody_waiting(connect: Connect, server: LocalServer) -> None:
    contents = Contents()
    contents.tensor(np.zeros(MIB, np.uint8))
    with connect() as client:
        client.call("AccumulatorService.TakeGradient", WAIT, contents)
        eventually(lambda: server.inspect(lambda each: each.registry.factory.waiters.used), (1).__eq__)
        assert (use_of(server).in_flight, use_of(server).memory) == (0, 0)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


LEAVE: dict[str, Callable[[socket.socket], object]] = {
    "close": lambda sock: sock.close(),
    "close the sending side": lambda sock: sock.shutdown(socket.SHUT_WR),
    "reset": reset,
    "send more": lambda sock: sock.send(b"x"),
}
WAIT = accumulator_messages_pb2.TakeGradientRequest(
    accumulator=accumulator_pb2.AccumulatorRef(name="a"), num_required=1
)


@pytest.mark.parametrize("leave", list(LEAVE.values()), ids=list(LEAVE))
def test_a_call_is_given_up(connect: Connect, server: LocalServer, leave: Callable[[socket.socket], object]) -> None:
    with connect() as client:
        client.call("AccumulatorService.TakeGradient", WAIT)
        eventually(lambda: server.inspect(lambda each: each.registry.factory.waiters.used), (1).__eq__)
        leave(client.sock)
        eventually(lambda: server.inspect(lambda each: each.registry.factory.waiters.used), (0).__eq__)
        if client.sock.fileno() >= 0:
            assert client.is_closed_by_server()


@pytest.mark.parametrize("is_whole", [True, False], ids=["a call that waits", "half a header"])
def test_a_client_vanishes_in_the_moment_in_which_it_sends(
    connect: Connect, server: LocalServer, is_whole: bool
) -> None:
    message = WAIT.SerializeToString()
    frame = call_frame(b"gradserve.v1.AccumulatorService.TakeGradient", message, message_bytes=len(message))
    client = connect()

    def send_and_vanish(_: Server) -> None:  # on the server's event loop, which sees both at once
        client.sock.sendall(frame if is_whole else frame[:10])
        reset(client.sock)

    server.inspect(send_and_vanish)
    eventually(lambda: use_of(server).connections, (0).__eq__)
    assert server.inspect(lambda each: each.registry.factory.waiters.used) == 0


def test_a_time_limit(connect: Connect) -> None:
    with connect() as client:
        client.call("AccumulatorService.TakeGradient", WAIT, seconds=0.05)
        frame = client.receive()
        assert frame.header.code == DEADLINE.value[0]
        assert answers(client)


@pytest.mark.parametrize("stage", range(5))
@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["close", "reset"])
def test_a_client_vanishes_while_it_sends(
    connect: Connect, stage: int, leave: Callable[[socket.socket], object]
) -> None:
    array = np.zeros(MIB, np.float32)
    contents = Contents()
    request = Store(tensors=[contents.tensor(array)]).SerializeToString()
    name = b"gradserve.v1.TensorService.StoreTensors"
    frame = call_frame(name, request + array.tobytes(), message_bytes=len(request), payload_bytes=array.nbytes)
    ends = (0, 10, 40, 32 + len(name) + len(request) + 5, len(frame) - 1)
    client = connect()
    client.sock.sendall(frame[: ends[stage]])
    leave(client.sock)


def test_a_client_vanishes_while_it_receives(connect: Connect) -> None:
    array = np.zeros(MIB, np.float32)
    with connect() as client, connect() as vanishing:
        handle = store(client, array)
        vanishing.call("TensorService.ReadTensors", Read(handles=[handle]))
        vanishing.sock.recv(100)
        reset(vanishing.sock)
        client.call("TensorService.DeleteTensors", tensor_messages_pb2.DeleteTensorsRequest(handles=[handle]))
        assert client.receive().header.code == 0


@pytest.mark.parametrize("way", ["bulk", "shared_memory"])
@pytest.mark.usefixtures("unused")
def test_a_thousand_connections_that_say_nothing(server: LocalServer, way: str) -> None:
    connect = connector(server, way)
    before = use_of(server)
    with connect() as client:
        crowd = []
        ticket = issue_ticket(server.address)
        try:
            for _ in range(1000):
                over = FrameClient.over_tcp if way == "bulk" else FrameClient.over_unix
                crowd.append(over(ticket))
            assert answers(client)
            seen = eventually(lambda: use_of(server), lambda use: use.connections <= before.connections + 1 + 257)
            assert seen.memory == before.memory
            assert seen.threads == before.threads
            with connect() as late:
                assert answers(late)
        finally:
            for each in crowd:
                each.sock.close()
