"""Memory that its owner spoils in the middle of a call, and the server's own memory as a gradient."""

import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from gradserve_protocol.frames import FrameHeader, FrameKind, Segment
from gradserve_protocol.memory.sealed import Seal
from gradserve_protocol.v1 import accumulator_messages_pb2, accumulator_pb2, tensor_pb2
from tests.rpc.sockets.conftest import Connect
from tests.rpc.sockets.test_regions import PAGE, a_region, beside, hand_over
from tests.rpc.sockets.test_server_regions import mapped
from tests.servers.frames import Frame, FrameClient
from tests.servers.raw_calls import RawCalls

SIZE = 1 << 18
NUM_BYTES = SIZE * 4
CALLS = 30
ADD_SEALS = 1033
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02


def truncate(descriptor: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, PAGE)


def grow(descriptor: int) -> None:
    os.ftruncate(descriptor, os.fstat(descriptor).st_size + PAGE)


def punch_holes(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    whole = ctypes.c_long(0), ctypes.c_long(NUM_BYTES)
    assert not libc.fallocate(descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, *whole)


def rewrite(descriptor: int) -> None:
    os.pwrite(descriptor, os.urandom(PAGE), NUM_BYTES // 2)


SPOILING: dict[str, Callable[[int], None]] = {each.__name__: each for each in (truncate, grow, punch_holes, rewrite)}


@contextmanager
def loosely_sealed() -> Iterator[tuple[int, mmap.mmap]]:
    """A region with no more seals than the server demands."""
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, NUM_BYTES)
        fcntl.fcntl(descriptor, ADD_SEALS, int(Seal.SHRINK | Seal.SEAL))
        yield descriptor, mmap.mmap(descriptor, NUM_BYTES)
    finally:
        os.close(descriptor)


@contextmanager
def again_and_again(action: Callable[[], None]) -> Iterator[None]:
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            action()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.fixture
def reference(raw: RawCalls, name: str) -> Iterator[accumulator_pb2.AccumulatorRef]:
    """An accumulator whose averages are large enough for a region."""
    reference = accumulator_pb2.AccumulatorRef(name=name)
    component = accumulator_pb2.ComponentSpec(
        dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=accumulator_pb2.PartialShape(dims=[SIZE])
    )
    spec = accumulator_pb2.AccumulatorSpec(components=[component])
    raw.call("CreateAccumulator", accumulator_messages_pb2.CreateAccumulatorRequest(accumulator=reference, spec=spec))
    yield reference
    raw.call("DeleteAccumulator", accumulator_messages_pb2.DeleteAccumulatorRequest(accumulator=reference))


def round_of_one(
    client: FrameClient, reference: accumulator_pb2.AccumulatorRef, region: int, offset: int = 0
) -> list[Frame]:
    """Has the average of a gradient in a region; returns the frames that come, the last of which is the reply."""
    part = accumulator_pb2.ComponentGradient(dense=beside(np.float32, [SIZE], 0))
    request = accumulator_messages_pb2.PushPullRequest(
        accumulator=reference, gradient=[part], num_required=1, local_step=1 << 40
    )
    client.call("AccumulatorService.PushPull", request, segments=[Segment(0, NUM_BYTES, region, offset)])
    frames = [client.receive()]
    while frames[-1].header.kind is not FrameKind.REPLY:
        frames.append(client.receive())
    return frames


def release(client: FrameClient, reply: Frame) -> None:
    (place,) = reply.segments
    client.send(FrameHeader(FrameKind.RELEASE, number=place.region, size=1))


@pytest.mark.parametrize("spoil", list(SPOILING.values()), ids=list(SPOILING))
def test_a_region_is_spoilt_while_it_is_read(
    connect_unix: Connect, reference: accumulator_pb2.AccumulatorRef, spoil: Callable[[int], None]
) -> None:
    with connect_unix() as client, loosely_sealed() as (descriptor, memory):
        hand_over(client, descriptor, NUM_BYTES)
        assert client.receive().header.code == 0
        gradient = np.frombuffer(memory, np.float32, SIZE)
        seen: dict[int, mmap.mmap] = {}
        with again_and_again(lambda: spoil(descriptor)):
            for _ in range(CALLS):
                for frame in round_of_one(client, reference, 1):
                    seen |= {frame.header.number: mapped(frame)} if frame.descriptors else {}
                assert frame.header.code == 0
                release(client, frame)
        gradient[:] = 5
        *regions, reply = round_of_one(client, reference, 1)
        seen |= {each.header.number: mapped(each) for each in regions if each.descriptors}
        (place,) = reply.segments
        average = np.frombuffer(seen[place.region], np.float32, SIZE, place.offset)
        assert average.tolist() == [5] * SIZE
        del gradient, average


def test_the_servers_own_region_is_a_gradient(connect_unix: Connect, reference: accumulator_pb2.AccumulatorRef) -> None:
    """The average may be written where the gradient is read: that is the client's own loss, and nobody else's."""
    with connect_unix() as client, connect_unix() as other, a_region(NUM_BYTES) as (descriptor, memory):
        for each in (client, other):
            hand_over(each, descriptor, NUM_BYTES)
            assert each.receive().header.code == 0
        np.frombuffer(memory, np.float32, SIZE)[:] = 7
        others_region, others_reply = round_of_one(other, reference, 1)
        kept = np.frombuffer(mapped(others_region), np.float32, SIZE, others_reply.segments[0].offset)
        np.frombuffer(memory, np.float32, SIZE)[:] = 3
        *regions, reply = round_of_one(client, reference, 1)
        servers = next(each for each in regions if each.descriptors)
        (place,) = reply.segments
        hand_over(client, servers.descriptors[0], servers.header.size, number=2)
        os.close(servers.descriptors[0])
        assert client.receive().header.code == 0
        release(client, reply)
        written = set()
        for _ in range(CALLS):
            *regions, reply = round_of_one(client, reference, 2, place.offset)
            for descriptor_of_another in [number for each in regions for number in each.descriptors]:
                os.close(descriptor_of_another)
            assert reply.header.code == 0
            written.add(reply.segments[0].region)
            release(client, reply)
        assert place.region in written, "an average was written where gradients are read"
        assert kept.tolist() == [7] * SIZE, "what another client reads stays what it is"
        del kept
