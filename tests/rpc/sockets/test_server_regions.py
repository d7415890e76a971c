"""Averages that a client on this machine reads in place: who may read what, and for how long it stays."""

import gc
import mmap
import os
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from gradserve_protocol.frames import FrameHeader, FrameKind
from gradserve_protocol.memory.sealed import map_region
from gradserve_protocol.v1 import server_messages_pb2, tensor_messages_pb2
from gradserve_server.app import Server
from gradserve_server.devices.host.shared_blocks import SharedAverages, SharedBlock, block_of
from gradserve_testing import LocalServer
from tests.rpc.sockets.conftest import Connect, connector
from tests.rpc.sockets.test_broken_rules import answers, refused
from tests.servers.frames import Frame, FrameClient
from tests.tensors.keeping import keep_now

INVALID = grpc.StatusCode.INVALID_ARGUMENT
SIZE = 1 << 17


class Shared:
    """Tensors of the server, in a block that its clients can read in place."""

    def __init__(self, server: Server, count: int = 2) -> None:
        context = server.sockets.context
        self.averages = SharedAverages(context.shared_memory, context.readers)
        arrays = self.averages.arrays([((SIZE,), np.dtype(np.uint8))] * count)
        assert arrays is not None
        for index, array in enumerate(arrays):
            array[...] = index + 1
        found = block_of(arrays[0].data)
        assert found is not None
        self.block: SharedBlock = found.block
        self.handles = keep_now(server.store, arrays, None, shared=True)


def read(client: FrameClient, handles: list[str]) -> list[Frame]:
    """Reads tensors; returns the frames that come, the last of which is the reply."""
    client.call("TensorService.ReadTensors", tensor_messages_pb2.ReadTensorsRequest(handles=handles))
    frames = [client.receive()]
    while frames[-1].header.kind is not FrameKind.REPLY:
        frames.append(client.receive())
    assert frames[-1].header.code == 0, frames[-1].status
    return frames


def mapped(frame: Frame) -> mmap.mmap:
    (descriptor,) = frame.descriptors
    try:
        return map_region(descriptor, frame.header.size)
    finally:
        os.close(descriptor)


@pytest.fixture
def reader(connect_unix: Connect) -> Iterator[FrameClient]:
    with connect_unix() as client:
        yield client


@pytest.fixture
def shared(reader: FrameClient, server: LocalServer) -> Iterator[Shared]:
    made = server.inspect(Shared)
    yield made
    server.inspect(lambda each: each.store.delete(made.handles))
    vars(made).clear()  # pytest keeps it for longer, and so the block


def test_a_region_comes_once_and_is_read_in_place(reader: FrameClient, shared: Shared, server: LocalServer) -> None:
    region, reply = read(reader, shared.handles)
    assert (region.header.kind, region.header.size) == (FrameKind.REGION, shared.block.num_bytes)
    assert reply.payload == b""
    memory = mapped(region)
    for value, segment in enumerate(reply.segments, start=1):
        assert segment.region == region.header.number
        assert memory[segment.offset : segment.offset + segment.num_bytes] == bytes([value]) * SIZE
    (again,) = read(reader, shared.handles[1:])
    assert again.segments[0].region == region.header.number
    reader.send(FrameHeader(FrameKind.RELEASE, number=region.header.number, size=2))
    assert answers(reader)


def test_parts_in_a_region_and_parts_that_follow(reader: FrameClient, shared: Shared, server: LocalServer) -> None:
    ordinary = [np.full(20_001, 7, np.uint8), np.full(3, 8, np.uint8)]
    others = server.inspect(lambda each: keep_now(each.store, ordinary, None, shared=False))
    handles = [others[0], shared.handles[0], others[1]]
    region, reply = read(reader, handles)
    memory = mapped(region)
    places = [reply.payload if not each.region else memory for each in reply.segments]
    found = [
        bytes(place[each.offset : each.offset + each.num_bytes])
        for place, each in zip(places, reply.segments, strict=True)
    ]
    assert found == [bytes([7]) * 20_001, bytes([1]) * SIZE, bytes([8]) * 3]
    assert all(each.offset % 64 == 0 for each in reply.segments)
    server.inspect(lambda each: each.store.delete(others))


@pytest.mark.parametrize("count", [0, 2, 1 << 63])
def test_only_what_is_read_is_released(reader: FrameClient, shared: Shared, count: int) -> None:
    region, _ = read(reader, shared.handles)
    os.close(region.descriptors[0])
    reader.send(FrameHeader(FrameKind.RELEASE, number=region.header.number, size=count))
    refused(reader, INVALID, f"expected 1 to 1 reads of region {region.header.number} to end, got {count}")


def free(server: LocalServer, shared: Shared) -> None:
    """Deletes the tensors of a block; the server refers to it no longer."""
    server.inspect(lambda each: each.store.delete(shared.handles))


def next_block(server: LocalServer, shared: Shared) -> Any:
    def look(_: Server) -> Any:
        arrays = shared.averages.arrays([((SIZE,), np.dtype(np.uint8))] * 2)
        assert arrays is not None
        found = block_of(arrays[0].data)
        assert found is not None
        return found.block

    return server.inspect(look)


def test_what_is_being_read_is_not_written(reader: FrameClient, shared: Shared, server: LocalServer) -> None:
    region, _ = read(reader, shared.handles)
    memory = mapped(region)
    free(server, shared)
    assert next_block(server, shared) is not shared.block
    assert memory[0] == 1
    reader.send(FrameHeader(FrameKind.RELEASE, number=region.header.number, size=1))
    assert answers(reader)
    assert not shared.block.is_retired


def test_once_released_it_is_used_again(reader: FrameClient, shared: Shared, server: LocalServer) -> None:
    region, _ = read(reader, shared.handles)
    os.close(region.descriptors[0])
    free(server, shared)
    reader.send(FrameHeader(FrameKind.RELEASE, number=region.header.number, size=1))
    assert answers(reader)
    assert next_block(server, shared) is shared.block


def test_what_a_client_may_still_read_is_never_written_again(
    connect_unix: Connect, reader: FrameClient, shared: Shared, server: LocalServer
) -> None:
    with connect_unix() as leaving:
        region, _ = read(leaving, shared.handles)
        memory = mapped(region)
    free(server, shared)
    assert next_block(server, shared) is not shared.block
    assert memory[0] == 1
    assert shared.block.is_spoilt
    assert answers(reader)


def test_a_region_that_is_not_used_any_more_is_dropped(
    reader: FrameClient, shared: Shared, server: LocalServer
) -> None:
    region, _ = read(reader, shared.handles)
    os.close(region.descriptors[0])
    reader.send(FrameHeader(FrameKind.RELEASE, number=region.header.number, size=1))
    assert answers(reader)
    shared.block.is_retired = True
    other = server.inspect(Shared)
    drop, new, reply = read(reader, other.handles)
    assert (drop.header.kind, drop.header.number) == (FrameKind.DROP, region.header.number)
    assert (new.header.kind, new.header.number) == (FrameKind.REGION, reply.segments[0].region)
    os.close(new.descriptors[0])
    server.inspect(lambda each: each.store.delete(other.handles))


def shared_bytes(server: LocalServer) -> int:
    gc.collect()
    return server.inspect(lambda each: each.sockets.context.shared_memory.used)


def test_a_dropped_region_counts_until_the_client_has_certainly_unmapped_it(
    reader: FrameClient, shared: Shared, server: LocalServer
) -> None:
    region, _ = read(reader, shared.handles)
    os.close(region.descriptors[0])
    num_bytes = shared.block.num_bytes
    free(server, shared)
    shared.block.is_retired = True
    del shared.block, shared.averages
    assert shared_bytes(server) == num_bytes, "the client reads it"
    reader.send(FrameHeader(FrameKind.RELEASE, number=region.header.number, size=1))
    reader.call("ServerService.GetServerInfo", server_messages_pb2.GetServerInfoRequest())
    assert reader.receive().header.kind is FrameKind.DROP
    assert reader.receive().header.kind is FrameKind.REPLY
    assert shared_bytes(server) == num_bytes, "the client may not have read DROP yet"
    assert answers(reader)
    assert shared_bytes(server) == 0


def test_over_tcp_nobody_gets_a_region(reader: FrameClient, shared: Shared, server: LocalServer) -> None:
    with connector(server, "bulk")() as client:
        (reply,) = read(client, shared.handles)
        assert reply.payload == b"\1" * SIZE + b"\2" * SIZE
        assert [each.region for each in reply.segments] == [0]
