"""The allocations that a connection knows of: each is handed over once, and none is taken for another."""

import numpy as np
import pytest

from gradserve.transport.sockets.gpu_regions import GpuRegion, GpuRegions, NotSharedError
from gradserve.transport.sockets.payloads import Payloads
from gradserve.transport.sockets.region_payloads import RegionPayloads
from gradserve_protocol.errors import ResourceExhaustedError
from gradserve_protocol.frames import HEADER_BYTES, FrameHeader, FrameKind
from gradserve_protocol.gpu import GpuArray
from gradserve_protocol.memory.pool import BufferPool, RegionPool
from gradserve_protocol.tensors import Contents
from gradserve_protocol.v1 import socket_messages_pb2
from tests.client.gpu.fake_gpu import FakeGpu, aligned

BASE, SIZE = 1 << 20, 1 << 16


@pytest.fixture
def gpu() -> FakeGpu:
    made = FakeGpu()
    made.allocate(BASE, SIZE)
    return made


@pytest.fixture
def regions(gpu: FakeGpu) -> GpuRegions:
    return GpuRegions(gpu.uuid, "")


def at(gpu: FakeGpu, address: int) -> GpuArray:
    return GpuArray(gpu, address, np.dtype(np.float32), (4,), None)


def message_of(regions: GpuRegions, region: GpuRegion) -> socket_messages_pb2.GpuRegion:
    frame = regions.frame_of(region)
    header = FrameHeader.unpack(frame[:HEADER_BYTES])
    assert (header.kind, header.number) == (FrameKind.GPU_REGION, region.number)
    assert header.size == region.allocation.num_bytes
    return socket_messages_pb2.GpuRegion.FromString(frame[HEADER_BYTES:])


def opened(regions: GpuRegions, array: GpuArray) -> GpuRegion:
    region = regions.place_of(array).region
    regions.handed_over(region, None)
    return region


def drops(frames: object) -> list[int]:
    return [FrameHeader.unpack(frame).number for frame in frames]  # type: ignore[attr-defined]


def test_an_allocation_is_handed_over_once(gpu: FakeGpu, regions: GpuRegions) -> None:
    first, second = regions.place_of(at(gpu, BASE + 64)), regions.place_of(at(gpu, BASE + 640))
    assert first.region is second.region
    assert (first.offset, second.offset) == (64, 640)
    assert message_of(regions, first.region) == socket_messages_pb2.GpuRegion(
        handle=gpu.memory_handle(BASE), buffer_id=1, event=b"e" * 64
    )
    assert not regions.is_open(first.region)
    regions.handed_over(first.region, None)
    assert regions.is_open(regions.place_of(at(gpu, BASE)).region)
    assert not list(regions.gone())
    assert not list(regions.surplus())


def test_the_event_goes_with_the_first_that_is_accepted(gpu: FakeGpu, regions: GpuRegions) -> None:
    for base in (2 * BASE, 3 * BASE):
        gpu.allocate(base, SIZE)
    first, second, third = (regions.place_of(at(gpu, base)).region for base in (BASE, 2 * BASE, 3 * BASE))
    assert message_of(regions, first).event
    regions.handed_over(first, "too many bytes")
    assert message_of(regions, second).event
    regions.handed_over(second, None)
    assert not message_of(regions, third).event


def test_what_is_refused_is_not_tried_again(gpu: FakeGpu, regions: GpuRegions) -> None:
    regions.handed_over(regions.place_of(at(gpu, BASE)).region, "too many bytes")
    with pytest.raises(NotSharedError, match="too many bytes"):
        regions.place_of(at(gpu, BASE))
    gpu.allocate(BASE, SIZE)
    regions.place_of(at(gpu, BASE))


def test_memory_that_was_freed_is_dropped(gpu: FakeGpu, regions: GpuRegions) -> None:
    region = opened(regions, at(gpu, BASE))
    del gpu.allocations[BASE]
    assert drops(regions.gone()) == [region.number]
    assert not list(regions.gone())


def test_memory_at_the_same_place_is_another_region(gpu: FakeGpu, regions: GpuRegions) -> None:
    before = opened(regions, at(gpu, BASE))
    gpu.allocate(BASE, SIZE)
    assert drops(regions.gone()) == [before.number]
    after = regions.place_of(at(gpu, BASE)).region
    assert after.number != before.number
    assert not regions.is_open(after)


def test_the_least_recently_used_makes_way(gpu: FakeGpu, regions: GpuRegions) -> None:
    numbers = []
    for index in range(1, 35):
        gpu.allocate(index * BASE, SIZE)
        numbers.append(opened(regions, at(gpu, index * BASE)).number)
    regions.place_of(at(gpu, BASE))
    assert drops(regions.surplus()) == numbers[1:3]


@pytest.mark.parametrize(
    ("uuid", "why_not", "reason"),
    [
        (b"v" * 16, "", "the server does not compute on this GPU"),
        (b"", "the server computes on the CPU", "the server computes on the CPU"),
        (b"", "", "the server does not compute on this GPU"),
    ],
)
def test_a_server_elsewhere(gpu: FakeGpu, uuid: bytes, why_not: str, reason: str) -> None:
    with pytest.raises(NotSharedError, match=reason):
        GpuRegions(uuid, why_not).place_of(at(gpu, BASE))


def test_what_cannot_be_shared(gpu: FakeGpu, regions: GpuRegions) -> None:
    gpu.allocate(2 * BASE, SIZE, can_be_shared=False)
    for address, reason in (
        (2 * BASE, "CUDA shares only what cudaMalloc has allocated"),
        (BASE + 4, "multiple of 64 bytes in its allocation"),
        (9 * BASE, "CUDA_ERROR_INVALID_VALUE"),
    ):
        with pytest.raises(NotSharedError, match=reason):
            regions.place_of(at(gpu, address))


class TestPayloads:
    """Payloads with arrays of a GPU."""

    def payloads(self, gpu: FakeGpu, told: list[str]) -> RegionPayloads:
        made = RegionPayloads(BufferPool(0), RegionPool(1 << 24), told.append)
        made.welcomed(socket_messages_pb2.Welcome(gpu=gpu.uuid))
        return made

    def test_arrays_of_both(self, gpu: FakeGpu) -> None:
        told: list[str] = []
        payloads, contents = self.payloads(gpu, told), Contents()
        contents.tensors([at(gpu, BASE + 64), np.arange(3, dtype=np.float32), at(gpu, BASE + 128)])
        (region,) = payloads.outgoing(contents).new_regions
        assert (gpu.recorded, told) == (0, [])
        payloads.handed_over(region, None)
        outgoing = payloads.outgoing(contents)
        while outgoing.new_regions:  # that of the host
            for each in outgoing.new_regions:
                payloads.handed_over(each, ResourceExhaustedError("no room"))
            outgoing = payloads.outgoing(contents)
        assert [(each.start, each.num_bytes, each.region) for each in outgoing.segments] == [
            (0, 16, region.number),
            (64, 12, 0),
            (128, 16, region.number),
        ]
        assert [each.offset for each in outgoing.segments] == [64, 0, 128]
        assert b"".join(outgoing.following)[:12] == np.arange(3, dtype=np.float32).tobytes()
        assert (gpu.recorded, told[-1]) == (1, "in place")

    def test_a_copy_is_made_once(self, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
        values = aligned(20_000)
        array = GpuArray(gpu, gpu.hold(values), np.dtype(np.float32), values.shape, None)
        reads: list[int] = []
        monkeypatch.setattr(gpu, "read", lambda address, target: reads.append(target.nbytes))
        told: list[str] = []
        payloads, contents = self.payloads(gpu, told), Contents()
        contents.tensors([array])
        payloads.handed_over(payloads.outgoing(contents).new_regions[0], ResourceExhaustedError("too many bytes"))
        for _ in range(3):
            payloads.outgoing(contents)
        assert reads == [80_000]
        assert told[-1] == "copied to the host: too many bytes"

    def test_what_is_written_is_never_a_copy(self, gpu: FakeGpu) -> None:
        contents = Contents(is_written=True)
        contents.tensors([at(gpu, 9 * BASE)])
        assert not self.payloads(gpu, []).outgoing(contents).is_possible
        assert not Payloads(BufferPool(0)).outgoing(contents).is_possible


def test_contents_for_other_ways_have_copies(gpu: FakeGpu) -> None:
    values = aligned(4)
    array = GpuArray(gpu, gpu.hold(values), np.dtype(np.float32), (4,), None)
    contents = Contents()
    contents.tensors([np.ones(2, np.float32), array, np.ones(1, np.float32)])
    payload = b"".join(contents.pieces())
    assert payload[64:80] == values.tobytes()
    assert len(payload) == 132
