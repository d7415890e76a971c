"""Memory that a client hands over: what is refused, what is counted, and what a client can do with it during a call."""

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_protocol.frames import PROTOCOL, FrameHeader, FrameKind, Segment, pack_segments
from gradserve_protocol.memory.sealed import Seal, make_region
from gradserve_protocol.tensors import to_data_type
from gradserve_protocol.v1 import (
    accumulator_messages_pb2,
    accumulator_pb2,
    server_messages_pb2,
    tensor_messages_pb2,
    tensor_pb2,
)
from gradserve_protocol.v1 import socket_messages_pb2 as messages_pb2
from gradserve_testing import LocalServer
from tests.rpc.sockets.conftest import LIMITS, MIB, Connect, use_of
from tests.rpc.sockets.test_broken_rules import Info, answers, call_frame, refused
from tests.servers.frames import FrameClient, issue_ticket
from tests.servers.polling import eventually
from tests.servers.raw_calls import RawCalls

INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
PAGE = mmap.PAGESIZE
_ADD_SEALS = 1033


@contextmanager
def a_region(num_bytes: int = PAGE) -> Iterator[tuple[int, mmap.mmap]]:
    descriptor, memory = make_region(num_bytes, read_only_for_others=False)
    try:
        yield descriptor, memory
    finally:
        os.close(descriptor)


def hand_over(client: FrameClient, descriptor: int, num_bytes: int = PAGE, number: int = 1) -> None:
    client.send(FrameHeader(FrameKind.REGION, number=number, size=num_bytes), descriptors=[descriptor])


def with_region(client: FrameClient, num_bytes: int = PAGE, number: int = 1) -> mmap.mmap:
    """Hands over a new region; its descriptor is closed."""
    with a_region(num_bytes) as (descriptor, memory):
        hand_over(client, descriptor, num_bytes, number)
        assert client.receive().header.code == 0
    return memory


def unsealed(_folder: Path) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, PAGE)
    return descriptor


def only_shrink(folder: Path) -> int:
    descriptor = unsealed(folder)
    fcntl.fcntl(descriptor, _ADD_SEALS, int(Seal.SHRINK))
    return descriptor


def regular_file(folder: Path) -> int:
    (folder / "file").write_bytes(bytes(PAGE))
    return os.open(folder / "file", os.O_RDWR)


def end_of_a_pipe(_folder: Path) -> int:
    descriptor, other_end = os.pipe2(os.O_CLOEXEC)
    os.close(other_end)
    return descriptor


NO_REGIONS: dict[str, tuple[Callable[[Path], int], str]] = {
    "pipe": (end_of_a_pipe, "another kind of descriptor"),
    "device": (lambda _: os.open("/dev/zero", os.O_RDWR), "another kind of descriptor"),
    "directory": (lambda folder: os.open(folder, os.O_RDONLY), "another kind of descriptor"),
    "file": (regular_file, "memory file"),
    "unsealed": (unsealed, "sealed with F_SEAL_SHRINK and F_SEAL_SEAL"),
    "one seal": (only_shrink, "sealed with F_SEAL_SHRINK and F_SEAL_SEAL"),
}


@pytest.mark.parametrize(("make", "message"), list(NO_REGIONS.values()), ids=list(NO_REGIONS))
def test_descriptors_that_are_no_regions(
    connect_unix: Connect, tmp_path: Path, make: Callable[[Path], int], message: str
) -> None:
    with connect_unix() as client, connect_unix() as other:
        descriptor = make(tmp_path)
        hand_over(client, descriptor)
        refused(client, INVALID, message)
        assert answers(other)
    os.close(descriptor)


@pytest.mark.parametrize("num_bytes", [0, PAGE + 1])
def test_sizes_that_a_region_does_not_have(connect_unix: Connect, num_bytes: int) -> None:
    with connect_unix() as client, a_region() as (descriptor, _):
        hand_over(client, descriptor, num_bytes)
        refused(client, INVALID, "expected a memory file of at least")


@pytest.mark.parametrize("count", [2, 3, 200])
def test_several_descriptors(connect_unix: Connect, count: int) -> None:
    with connect_unix() as client, a_region() as (descriptor, _):
        client.send(FrameHeader(FrameKind.REGION, number=1, size=PAGE), descriptors=[descriptor] * count)
        refused(client, INVALID, "expected at most one descriptor, got several")


def test_descriptors_with_both_halves_of_a_header(connect_unix: Connect) -> None:
    data = FrameHeader(FrameKind.REGION, number=1, size=PAGE).pack()
    with connect_unix() as client, a_region() as (descriptor, _):
        for half in (data[:16], data[16:]):
            client.sock.sendmsg([half], [(1, 1, np.array([descriptor], np.int32).tobytes())])
        refused(client, INVALID, "expected at most one descriptor, got several")


TAKE_NONE = {
    "call": call_frame(),
    "drop": FrameHeader(FrameKind.DROP, number=1).pack(),
    "release": FrameHeader(FrameKind.RELEASE, number=1, size=1).pack(),
}


@pytest.mark.parametrize("frame", list(TAKE_NONE.values()), ids=list(TAKE_NONE))
def test_descriptors_with_other_frames(connect_unix: Connect, frame: bytes) -> None:
    with connect_unix() as client, a_region() as (descriptor, _):
        client.sock.sendmsg([frame], [(1, 1, np.array([descriptor], np.int32).tobytes())])
        refused(client, INVALID, "expected a descriptor with REGION only")


def test_a_descriptor_with_hello(connect_unix: Connect, server: LocalServer) -> None:
    ticket = issue_ticket(server.address).ticket
    message = messages_pb2.Hello(ticket=ticket, client_id="somebody").SerializeToString()
    with connect_unix(hello=False) as client, a_region() as (descriptor, _):
        header = FrameHeader(FrameKind.HELLO, message_bytes=len(message), number=PROTOCOL)
        client.send(header, message, [descriptor])
        refused(client, INVALID, "expected a descriptor with REGION only")


@pytest.mark.parametrize(
    ("count", "message"),
    [(1, "expected a descriptor with REGION only"), (9, "expected at most one descriptor, got several")],
)
def test_descriptors_inside_a_message(connect_unix: Connect, count: int, message: str) -> None:
    frame = call_frame()
    with connect_unix() as client, a_region() as (descriptor, _):
        client.sock.sendall(frame[:40])
        client.sock.sendmsg([frame[40:]], [(1, 1, np.array([descriptor] * count, np.int32).tobytes())])
        refused(client, INVALID, message)


@pytest.mark.parametrize("number", [0, 1])
def test_numbers_that_are_not_new(connect_unix: Connect, number: int) -> None:
    with connect_unix() as client, a_region() as (descriptor, _):
        with_region(client, number=1)
        hand_over(client, descriptor, number=number)
        refused(client, INVALID, f"expected a new number other than 0 for a region, got {number}")


def test_all_regions_have_a_budget(connect_unix: Connect, server: LocalServer) -> None:
    half = LIMITS.max_region_bytes // 2
    with connect_unix() as first, connect_unix() as second:
        with_region(first, half)
        with_region(second, half)
        with a_region() as (descriptor, _):
            hand_over(second, descriptor, number=2)
            frame = second.receive()
            assert frame.header.code == EXHAUSTED.value[0]
            assert "too many bytes of clients' shared memory" in frame.status.message
            first.send(FrameHeader(FrameKind.DROP, number=1))
            assert answers(first)
            hand_over(second, descriptor, number=2)
            assert second.receive().header.code == 0
        assert use_of(server).region_bytes == half + PAGE


@pytest.mark.parametrize("num_bytes", [1 << 40, (1 << 64) - 1])
def test_an_empty_file_counts_with_its_size(connect_unix: Connect, num_bytes: int) -> None:
    with connect_unix() as client, a_region(1 << 40) as (descriptor, _):
        hand_over(client, descriptor, num_bytes)
        assert client.receive().header.code == EXHAUSTED.value[0]
        assert answers(client)


@pytest.fixture
def two_regions_allowed(server: LocalServer) -> Iterator[None]:
    budget = server.inspect(lambda each: each.sockets.context.fair.regions)
    limit, budget.limit = budget.limit, 2
    yield
    budget.limit = limit


@pytest.mark.usefixtures("two_regions_allowed")
def test_the_number_of_regions_is_limited(connect_unix: Connect) -> None:
    with connect_unix() as client, a_region() as (descriptor, _):
        for number, code in ((1, 0), (2, 0), (3, EXHAUSTED.value[0])):
            hand_over(client, descriptor, number=number)
            assert client.receive().header.code == code
        client.send(FrameHeader(FrameKind.DROP, number=1))
        hand_over(client, descriptor, number=1)
        assert client.receive().header.code == 0


BAD_SEGMENTS: dict[str, tuple[list[Segment], str]] = {
    "beyond the end": (
        [Segment(0, PAGE + 1, 1, 0)],
        f"within the {PAGE} bytes of region 1, got one of {PAGE + 1} at 0",
    ),
    "begins at the end": ([Segment(0, 1, 1, PAGE)], f"within the {PAGE} bytes of region 1"),
    "2^63": ([Segment(0, 1 << 63, 1, 0)], "at most 9223372036854775807 bytes, as the ticket says"),
    "a place near 2^64": ([Segment(0, 64, 1, (1 << 64) - 64)], f"within the {PAGE} bytes of region 1"),
    "another region": ([Segment(0, 64, 2, 0)], "expected the number of a region, got 2"),
    "misaligned": ([Segment(0, 64, 1, 4)], "at multiples of 64"),
    "overlap": ([Segment(0, 128, 1, 0), Segment(64, 64, 1, 128)], "do not overlap"),
}


@pytest.mark.parametrize(("segments", "message"), list(BAD_SEGMENTS.values()), ids=list(BAD_SEGMENTS))
def test_segments_that_a_region_does_not_have(connect_unix: Connect, segments: list[Segment], message: str) -> None:
    with connect_unix() as client:
        with_region(client)
        client.sock.sendall(call_frame(rest=pack_segments(segments), size=len(segments)))
        refused(client, INVALID, message)


def test_a_dropped_region_is_gone(connect_unix: Connect, server: LocalServer) -> None:
    with connect_unix() as client:
        with_region(client)
        client.send(FrameHeader(FrameKind.DROP, number=1))
        client.sock.sendall(call_frame(rest=pack_segments([Segment(0, 64, 1, 0)]), size=1))
        refused(client, INVALID, "expected the number of a region, got 1")


@pytest.mark.parametrize(("direction", "num_bytes"), [(3, 0), (0, PAGE - 1)])
def test_regions_count_as_payload(connect_unix: Connect, direction: int, num_bytes: int) -> None:
    with connect_unix(direction=direction, num_bytes=num_bytes) as client:
        with_region(client)
        client.sock.sendall(call_frame(rest=pack_segments([Segment(0, PAGE, 1, 0)]), size=1))
        refused(client, INVALID, f"expected a payload of at most {num_bytes} bytes, as the ticket says, got {PAGE}")


def beside(dtype: Any, shape: Sequence[int], offset: int) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=to_data_type(np.dtype(dtype)), shape=shape, payload_offset=offset)


def call_with(client: FrameClient, method: str, request: Any, num_bytes: int) -> None:
    client.call(method, request, segments=[Segment(0, num_bytes, 1, 0)])


def test_what_is_stored_from_a_region_is_a_copy(connect_unix: Connect) -> None:
    request = tensor_messages_pb2.StoreTensorsRequest(tensors=[beside(np.uint8, [PAGE], 0)])
    with connect_unix() as client:
        memory = with_region(client)
        memory[:] = b"a" * PAGE
        call_with(client, "TensorService.StoreTensors", request, PAGE)
        stored, _ = client.answer(tensor_messages_pb2.StoreTensorsResponse)
        memory[:] = b"b" * PAGE
        read = tensor_messages_pb2.ReadTensorsRequest(handles=[stored.tensors[0].handle], release=True)
        client.call("TensorService.ReadTensors", read)
        response, frame = client.answer(tensor_messages_pb2.ReadTensorsResponse)
        assert (response.tensors[0].content or frame.payload) == b"a" * PAGE


def test_copies_of_a_region_need_memory(connect_unix: Connect, server: LocalServer) -> None:
    num_bytes = MIB
    request = tensor_messages_pb2.StoreTensorsRequest(tensors=[beside(np.uint8, [num_bytes], 0)])
    budget = server.inspect(lambda each: each.sockets.context.memory)
    with connect_unix() as client:
        with_region(client, num_bytes)
        limit, budget.limit = budget.limit, num_bytes - 1
        try:
            call_with(client, "TensorService.StoreTensors", request, num_bytes)
            frame = client.receive()
        finally:
            budget.limit = limit
        assert frame.header.code == EXHAUSTED.value[0]
        assert answers(client)


class Rewriter:
    """Writes two values to memory in turns, until the end of the block."""

    def __init__(self, memory: NDArray[Any], values: Sequence[Any]) -> None:
        self._memory, self._values = memory, values
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._is_over.is_set():
            for value in self._values:
                self._memory[...] = value

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join()


def make_accumulator(
    raw: RawCalls, name: str, *, sparse: bool, size: int = 1024, **fields: Any
) -> accumulator_pb2.AccumulatorRef:
    component = accumulator_pb2.ComponentSpec(
        dtype=tensor_pb2.DATA_TYPE_FLOAT32,
        shape=accumulator_pb2.PartialShape(dims=[8, 64] if sparse else [size]),
        layout=accumulator_pb2.LAYOUT_SPARSE if sparse else accumulator_pb2.LAYOUT_DENSE,
    )
    reference = accumulator_pb2.AccumulatorRef(name=name)
    spec = accumulator_pb2.AccumulatorSpec(components=[component], **fields)
    raw.call("CreateAccumulator", accumulator_messages_pb2.CreateAccumulatorRequest(accumulator=reference, spec=spec))
    return reference


def take(raw: RawCalls, reference: accumulator_pb2.AccumulatorRef, count: int) -> Any:
    request = accumulator_messages_pb2.TakeGradientRequest(accumulator=reference, num_required=count)
    (part,) = raw.call("TakeGradient", request).average.components
    raw.call("DeleteAccumulator", accumulator_messages_pb2.DeleteAccumulatorRequest(accumulator=reference))
    return part


CALLS = 100


def test_indices_that_change_during_a_call(connect_unix: Connect, raw: RawCalls, name: str) -> None:
    reference = make_accumulator(raw, name, sparse=True)
    sparse = accumulator_pb2.SparseGradient(
        indices=beside(np.int64, [64], 0), values=beside(np.float32, [64, 64], PAGE)
    )
    part = accumulator_pb2.ComponentGradient(sparse=sparse)
    request = accumulator_messages_pb2.ApplyGradientRequest(accumulator=reference, gradient=[part])
    num_bytes = PAGE + 64 * 64 * 4
    codes = []
    with connect_unix() as client:
        memory = with_region(client, num_bytes)
        indices = np.frombuffer(memory, np.int64, 64)
        np.frombuffer(memory, np.float32, 64 * 64, PAGE)[:] = 1
        indices[:] = 3
        with Rewriter(indices, [3, 1 << 40, -5]):
            for _ in range(CALLS):
                call_with(client, "AccumulatorService.ApplyGradient", request, num_bytes)
                codes.append(client.receive().header.code)
        indices[:] = 3
        call_with(client, "AccumulatorService.ApplyGradient", request, num_bytes)
        codes.append(client.receive().header.code)
        del indices
    assert set(codes) <= {0, INVALID.value[0]}
    average = take(raw, reference, codes.count(0))
    assert set(np.frombuffer(average.sparse.indices.content, np.int64)) == {3}
    assert np.isfinite(np.frombuffer(average.sparse.values.content, np.float32)).all()


def test_values_that_change_while_they_are_checked(connect_unix: Connect, raw: RawCalls, name: str) -> None:
    reference = make_accumulator(raw, name, sparse=False, refuse_non_finite=True)
    part = accumulator_pb2.ComponentGradient(dense=beside(np.float32, [1024], 0))
    request = accumulator_messages_pb2.ApplyGradientRequest(accumulator=reference, gradient=[part])
    codes = []
    with connect_unix() as client:
        memory = np.frombuffer(with_region(client), np.float32)
        memory[:] = 1
        with Rewriter(memory, [1, np.nan]):
            for _ in range(CALLS):
                call_with(client, "AccumulatorService.ApplyGradient", request, PAGE)
                codes.append(client.receive().header.code)
        memory[:] = 1
        call_with(client, "AccumulatorService.ApplyGradient", request, PAGE)
        codes.append(client.receive().header.code)
        del memory
    assert set(codes) <= {0, INVALID.value[0]}
    average = take(raw, reference, codes.count(0))
    assert np.frombuffer(average.dense.content, np.float32).tolist() == [1] * 1024


def test_a_sum_keeps_nothing_of_a_region(connect_unix: Connect, raw: RawCalls, name: str) -> None:
    reference = make_accumulator(raw, name, sparse=False)
    part = accumulator_pb2.ComponentGradient(dense=beside(np.float32, [1024], 0))
    request = accumulator_messages_pb2.ApplyGradientRequest(accumulator=reference, gradient=[part])
    with connect_unix() as client:
        memory = np.frombuffer(with_region(client), np.float32)
        for value in (1, 2, 6):
            memory[:] = value
            call_with(client, "AccumulatorService.ApplyGradient", request, PAGE)
            assert client.receive().header.code == 0
            memory[:] = np.nan
        del memory
    average = take(raw, reference, 3)
    assert np.frombuffer(average.dense.content, np.float32).tolist() == [3] * 1024


@pytest.mark.parametrize("call", ["nothing", "a drop", "a release"])
def test_a_region_is_dropped_in_the_middle_of_a_call(
    connect_unix: Connect, server: LocalServer, raw: RawCalls, name: str, call: str
) -> None:
    reference = make_accumulator(raw, name, sparse=False)
    part = accumulator_pb2.ComponentGradient(dense=beside(np.float32, [1024], 0))
    request = accumulator_messages_pb2.PushPullRequest(accumulator=reference, gradient=[part], num_required=2)
    frames = {
        "nothing": b"",
        "a drop": FrameHeader(FrameKind.DROP, number=1).pack(),
        "a release": FrameHeader(FrameKind.RELEASE, number=1, size=1).pack(),
    }
    with connect_unix() as client:
        memory = with_region(client)
        memory[:] = np.full(1024, 4, np.float32).tobytes()
        call_with(client, "AccumulatorService.PushPull", request, PAGE)
        eventually(lambda: server.inspect(lambda each: each.registry.factory.waiters.used), (1).__eq__)
        memory.close()
        client.sock.sendall(frames[call])
        if call == "nothing":
            client.sock.close()
        else:
            assert client.is_closed_by_server()
    eventually(lambda: server.inspect(lambda each: each.registry.factory.waiters.used), (0).__eq__)
    average = take(raw, reference, 1)
    assert np.frombuffer(average.dense.content, np.float32).tolist() == [4] * 1024, "the gradient itself had counted"


def test_other_connections_do_not_know_a_region(connect_unix: Connect) -> None:
    with connect_unix() as owner, connect_unix() as stranger:
        with_region(owner)
        stranger.sock.sendall(call_frame(rest=pack_segments([Segment(0, 64, 1, 0)]), size=1))
        refused(stranger, INVALID, "expected the number of a region, got 1")
        owner.call("ServerService.GetServerInfo", Info(), segments=[Segment(0, 64, 1, 0)])
        owner.answer(server_messages_pb2.GetServerInfoResponse)
