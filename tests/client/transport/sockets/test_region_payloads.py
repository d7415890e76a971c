"""Replies whose tensors are in regions of the server."""

import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gradserve
from gradserve.calls.exchange import Unary, Whole
from gradserve.transport.sockets.conversation import Inbox, Receive, Send, call
from gradserve.transport.sockets.region_payloads import RegionPayloads
from gradserve_protocol.frames import HEADER_BYTES, FrameHeader, FrameKind, Segment, pack_segments
from gradserve_protocol.memory.pool import BufferPool, RegionPool
from gradserve_protocol.memory.sealed import make_region
from gradserve_protocol.tensors import Contents, WithContents
from gradserve_protocol.v1 import tensor_messages_pb2, tensor_pb2
from tests.client.transport.sockets.test_conversation import READ
from tests.servers.descriptors import num_open

NUM_BYTES = 1 << 16


@pytest.fixture
def region() -> Iterator[int]:
    descriptor, memory = make_region(NUM_BYTES, read_only_for_others=True)
    np.frombuffer(memory, np.uint8)[:] = np.arange(NUM_BYTES, dtype=np.uint8)
    yield descriptor
    os.close(descriptor)


def reply(offset: int, num_bytes: int, number: int = 7) -> bytes:
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[num_bytes], payload_offset=0)
    message = tensor_messages_pb2.ReadTensorsResponse(tensors=[tensor]).SerializeToString()
    segments = pack_segments([Segment(0, num_bytes, number, offset)])
    header = FrameHeader(FrameKind.REPLY, message_bytes=len(message), size=1)
    return header.pack() + segments + message


def drive(payloads: RegionPayloads, frames: list[tuple[bytes, list[int]]], unary: Unary = READ) -> tuple[Any, bytes]:
    """Returns the reply and what the client sent; each frame of the server may bring descriptors."""
    inbox = Inbox(takes_descriptors=True)
    conversation = call(Whole(unary), math.inf, payloads, inbox)
    sent = b""
    try:
        step = next(conversation)
        while True:
            answer = None
            match step:
                case Send(buffers):
                    sent += b"".join(buffers)
                case Receive(memory, at_least, descriptors):
                    arrived, brought = frames.pop(0)
                    assert len(arrived) >= at_least
                    assert descriptors is not None
                    descriptors += map(os.dup, brought)
                    memory[: len(arrived)] = arrived
                    answer = len(arrived)
            step = conversation.send(answer)
    except StopIteration as stop:
        return stop.value, sent
    finally:
        inbox.close()


def test_a_region_is_read_and_released(region: int) -> None:
    payloads = RegionPayloads(BufferPool(0), RegionPool(0))
    handed_over = FrameHeader(FrameKind.REGION, number=7, size=NUM_BYTES).pack()
    received, sent = drive(payloads, [(handed_over, [region]), (reply(64, 1000), [])])
    np.testing.assert_array_equal(received.arrays[0], np.arange(64, 1064, dtype=np.int64).astype(np.uint8))
    assert sent.endswith(FrameHeader(FrameKind.RELEASE, number=7, size=1).pack())
    again, sent = drive(payloads, [(reply(0, 10), [])])
    assert again.arrays[0].tolist() == list(range(10))
    assert sent.endswith(FrameHeader(FrameKind.RELEASE, number=7, size=1).pack())
    dropped = FrameHeader(FrameKind.DROP, number=7).pack()
    with pytest.raises(gradserve.InternalError, match="malformed reply"):
        drive(payloads, [(dropped, []), (reply(0, 10), [])])


def test_a_read_in_place_ends_with_its_array(region: int) -> None:
    payloads = RegionPayloads(BufferPool(0), RegionPool(0))
    handed_over = FrameHeader(FrameKind.REGION, number=7, size=NUM_BYTES).pack()
    payloads.notice(FrameHeader.unpack(handed_over), [os.dup(region)])
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[1000], payload_offset=0)
    first, second = (payloads.incoming([tensor], [Segment(0, 1000, 7, 64)], 0, in_place=True) for _ in range(2))
    seen = []
    del first
    seen.append(payloads.reads_in_place)
    part = second.by_offset[0][10:]
    del second
    seen.append(payloads.reads_in_place)
    assert part[0] == 74
    del part
    seen.append(payloads.reads_in_place)
    assert seen == [True, True, False]
    assert payloads.farewells() == [FrameHeader(FrameKind.RELEASE, number=7, size=2).pack()]
    assert not payloads.reads_in_place


@pytest.mark.parametrize(
    ("offset", "num_bytes", "number"),
    [(NUM_BYTES - 64, 65, 7), (1 << 60, 1, 7), (0, 1, 8)],
    ids=["beyond its end", "far beyond", "unknown region"],
)
def test_places_that_are_not_in_it(region: int, offset: int, num_bytes: int, number: int) -> None:
    handed_over = FrameHeader(FrameKind.REGION, number=7, size=NUM_BYTES).pack()
    with pytest.raises(gradserve.InternalError, match="malformed reply"):
        drive(
            RegionPayloads(BufferPool(0), RegionPool(0)),
            [(handed_over, [region]), (reply(offset, num_bytes, number), [])],
        )


def test_what_is_no_region() -> None:
    read, write = os.pipe()
    try:
        handed_over = FrameHeader(FrameKind.REGION, number=7, size=10).pack()
        for descriptors in ([read], [], [read, write]):
            with pytest.raises(gradserve.InternalError, match="malformed reply"):
                drive(RegionPayloads(BufferPool(0), RegionPool(0)), [(handed_over, descriptors)])
            assert num_open(read) == 2  # both ends of the pipe, and no copies
    finally:
        os.close(read)
        os.close(write)


def test_an_array_is_copied_once_into_a_region_that_is_new() -> None:
    array = np.arange(NUM_BYTES, dtype=np.uint8)
    contents = Contents()
    request = tensor_messages_pb2.StoreTensorsRequest(tensors=contents.tensors([array]))
    message = tensor_messages_pb2.StoreTensorsResponse(tensors=[{"handle": "h"}]).SerializeToString()
    stored = FrameHeader(FrameKind.REPLY, message_bytes=len(message)).pack() + message
    welcome = FrameHeader(FrameKind.REPLY).pack()
    payloads = RegionPayloads(BufferPool(0), RegionPool(0))
    received, sent = drive(
        payloads, [(welcome, []), (stored, [])], Unary("TensorService", "StoreTensors", WithContents(request, contents))
    )
    assert received.message.tensors[0].handle == "h"
    assert FrameHeader.unpack(sent[:HEADER_BYTES]).kind is FrameKind.REGION
    assert FrameHeader.unpack(sent[HEADER_BYTES : 2 * HEADER_BYTES]).kind is FrameKind.CALL
