"""Frames that hand over memory of a GPU: what is refused, and what goes on all the same."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from gradserve.testing import ServerProcess
from gradserve_protocol.frames import FrameHeader, FrameKind, Segment
from gradserve_protocol.gpu import Gpu, open_gpu
from gradserve_protocol.v1 import socket_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import tensor_messages_pb2, tensor_pb2
from tests.rpc.sockets.test_broken_rules import answers, refused
from tests.servers.frames import FrameClient, issue_ticket

INVALID = grpc.StatusCode.INVALID_ARGUMENT
FIRST = 1


class Memory:
    """An allocation of this process, and the frames that hand it over."""

    def __init__(self, gpu: Any) -> None:
        driver = open_gpu(0)
        assert isinstance(driver, Gpu)
        self._driver = driver
        self.array = gpu.array(np.arange(64, dtype=np.float32))
        self.allocation = driver.allocation_of(self.array.data.ptr)
        self.offset = self.array.data.ptr - self.allocation.base
        self._event = driver.new_event()

    def region(self, **changes: Any) -> messages_pb2.GpuRegion:
        fields: dict[str, Any] = {
            "handle": self._driver.memory_handle(self.allocation.base),
            "buffer_id": self.allocation.buffer_id,
            "event": self._driver.event_handle(self._event),
        }
        return messages_pb2.GpuRegion(**(fields | changes))

    def size(self) -> int:
        return self.allocation.num_bytes


@pytest.fixture
def memory(gpu: Any) -> Iterator[Memory]:
    made = Memory(gpu)
    yield made
    del made.array


def connected(server: ServerProcess) -> FrameClient:
    ticket = issue_ticket(server.address)
    client = FrameClient.over_unix(ticket)
    welcome = messages_pb2.Welcome.FromString(client.hello(ticket.ticket).message)
    assert (len(welcome.gpu), welcome.why_no_gpu) == (16, "")
    return client


def hand_over(client: FrameClient, region: messages_pb2.GpuRegion | bytes, size: int, number: int = FIRST) -> None:
    message = region if isinstance(region, bytes) else region.SerializeToString()
    client.send(FrameHeader(FrameKind.GPU_REGION, message_bytes=len(message), number=number, size=size), message)


BROKEN: dict[str, tuple[Callable[[Memory], tuple[Any, int, int]], str]] = {
    "no message": (lambda _: (b"", 64, 1), "expected a handle of 64 bytes, got 0"),
    "no protobuf": (lambda _: (b"\xff\xff", 64, 1), "expected a GpuRegion"),
    "a short handle": (lambda it: (it.region(handle=b"x"), 64, 1), "expected a handle of 64 bytes, got 1"),
    "a short event": (lambda it: (it.region(event=b"x"), 64, 1), "the handle of an event of 64 bytes, got 1"),
    "no event": (lambda it: (it.region(event=b""), 64, 1), "expected an event with the first GPU_REGION"),
    "number 0": (lambda it: (it.region(), 64, 0), "expected a new number other than 0 for a region, got 0"),
    "a long message": (lambda _: (bytes(5000), 64, 1), "expected GPU_REGION with a short message"),
}


@pytest.mark.parametrize(("make", "message"), list(BROKEN.values()), ids=list(BROKEN))
def test_frames_that_end_the_connection(server_of_gpu: ServerProcess, memory: Memory, make: Any, message: str) -> None:
    region, size, number = make(memory)
    with connected(server_of_gpu) as client, connected(server_of_gpu) as other:
        hand_over(client, region, size, number)
        refused(client, INVALID, message)
        assert answers(other)


NOT_OPENED: dict[str, tuple[Callable[[Memory], tuple[Any, int]], str]] = {
    "too large": (lambda it: (it.region(), it.size() + 1), "expected memory of at least"),
    "far too large": (lambda it: (it.region(), 1 << 39), "expected memory of at least"),
    "no memory": (lambda it: (it.region(handle=os.urandom(64)), 64), "the memory cannot be opened"),
    "an event for memory": (lambda it: (it.region(handle=it.region().event), 64), "the memory cannot be opened"),
    "memory for an event": (lambda it: (it.region(event=it.region().handle), 64), "the event cannot be opened"),
}


@pytest.mark.parametrize(("make", "message"), list(NOT_OPENED.values()), ids=list(NOT_OPENED))
def test_memory_that_cannot_be_opened(server_of_gpu: ServerProcess, memory: Memory, make: Any, message: str) -> None:
    region, size = make(memory)
    with connected(server_of_gpu) as client:
        hand_over(client, region, size)
        frame = client.receive()
        assert frame.header.code == INVALID.value[0]
        assert message in frame.status.message
        hand_over(client, memory.region(), memory.size())
        assert client.receive().header.code == 0, "the connection goes on"


def test_a_second_event(server_of_gpu: ServerProcess, memory: Memory) -> None:
    with connected(server_of_gpu) as client:
        hand_over(client, memory.region(), memory.size())
        assert client.receive().header.code == 0
        hand_over(client, memory.region(), memory.size(), 2)
        refused(client, INVALID, "expected an event with the first GPU_REGION of a connection, and with no other")


def test_a_handle_of_memory_that_was_there_before(server_of_gpu: ServerProcess, memory: Memory) -> None:
    """CUDA may give new memory the handle of memory that was freed; the server would find the old one open."""
    with connected(server_of_gpu) as client, connected(server_of_gpu) as other:
        hand_over(client, memory.region(), memory.size())
        assert client.receive().header.code == 0
        later = memory.region(buffer_id=memory.allocation.buffer_id + 1)
        hand_over(other, later, memory.size())
        assert "memory that had the same handle, and has been freed, is still open" in other.receive().status.message
        client.send(FrameHeader(FrameKind.DROP, number=FIRST))
        assert answers(client)
        hand_over(other, later, memory.size())
        assert other.receive().header.code == 0


def test_over_tcp(server_of_gpu: ServerProcess, memory: Memory) -> None:
    ticket = issue_ticket(server_of_gpu.address)
    with FrameClient.over_tcp(ticket) as client:
        assert client.hello(ticket.ticket).header.code == 0
        hand_over(client, memory.region(), memory.size())
        refused(client, INVALID, "expected no memory of a GPU, as the answer to HELLO names none")


def floats(count: int, offset: int = 0) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[count], payload_offset=offset)


class TestSegments:
    def store(self, client: FrameClient, segment: Segment, count: int = 64) -> None:
        request = tensor_messages_pb2.StoreTensorsRequest(tensors=[floats(count)])
        client.call("TensorService.StoreTensors", request, segments=[segment])

    def test_in_the_region(self, server_of_gpu: ServerProcess, memory: Memory) -> None:
        with connected(server_of_gpu) as client:
            hand_over(client, memory.region(), memory.size())
            assert client.receive().header.code == 0
            memory.array.get()  # nothing is under way
            self.store(client, Segment(0, 256, FIRST, memory.offset))
            stored, _ = client.answer(tensor_messages_pb2.StoreTensorsResponse)
            read = tensor_messages_pb2.ReadTensorsRequest(handles=[stored.tensors[0].handle], release=True)
            client.call("TensorService.ReadTensors", read)
            response, frame = client.answer(tensor_messages_pb2.ReadTensorsResponse)
            found = np.frombuffer(response.tensors[0].content or frame.payload, np.float32)
            np.testing.assert_array_equal(found, np.arange(64))

    def test_not_in_the_region(self, server_of_gpu: ServerProcess, memory: Memory) -> None:
        size = memory.size()
        for segment, message in (
            (Segment(0, 256, FIRST, size - 192), f"expected a segment within the {size} bytes of region 1"),
            (Segment(0, 256, FIRST, 4), "expected segments at multiples of 64"),
            (Segment(0, 256, 2, 0), "expected the number of a region, got 2"),
        ):
            with connected(server_of_gpu) as client:
                hand_over(client, memory.region(), size)
                assert client.receive().header.code == 0
                self.store(client, segment)
                refused(client, INVALID, message)


class TestInto:
    """Where `ReadTensors` writes to."""

    @pytest.mark.parametrize(
        ("places", "message"),
        [
            ([floats(64), floats(64, 256)], "expected one place for each of the 1 handles, got 2"),
            ([floats(63)], "expected a place for shape [64] of float32, got one for [63] of float32"),
            (
                [tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[64], content=bytes(256))],
                "expected a place in memory of the GPU",
            ),
            ([tensor_pb2.Tensor(handle="no such one")], "no such one"),
        ],
    )
    def test_other_places(self, server_of_gpu: ServerProcess, memory: Memory, places: Any, message: str) -> None:
        with connected(server_of_gpu) as client:
            hand_over(client, memory.region(), memory.size())
            assert client.receive().header.code == 0
            store = tensor_messages_pb2.StoreTensorsRequest(
                tensors=[tensor_pb2.Tensor(dtype=floats(1).dtype, shape=[64], content=bytes(256))]
            )
            client.call("TensorService.StoreTensors", store)
            stored, _ = client.answer(tensor_messages_pb2.StoreTensorsResponse)
            read = tensor_messages_pb2.ReadTensorsRequest(handles=[stored.tensors[0].handle], into=places, release=True)
            segments = [Segment(0, 256, FIRST, memory.offset), Segment(256, 256, FIRST, memory.offset)]
            client.call("TensorService.ReadTensors", read, segments=segments)
            frame = client.receive()
            assert frame.header.code in (INVALID.value[0], grpc.StatusCode.NOT_FOUND.value[0])
            assert message in frame.status.message
            np.testing.assert_array_equal(memory.array.get(), np.arange(64))
