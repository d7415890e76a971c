"""The payload beside a message: where tensors may be, who uses them, and when its memory is free."""

from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.device import CpuDevice
from gradserve_server.resources.budget import Budget, Reservation
from gradserve_server.tensors.held import Residence
from gradserve_server.tensors.incoming import (
    Attached,
    IncomingTensor,
    IncomingTensors,
    Live,
    Malformed,
    Stored,
    TensorOpener,
    tensors_in,
)
from gradserve_server.tensors.payload import NO_PAYLOAD, Payload, PayloadSegment
from gradserve_server.tensors.spec import TensorSpec
from tests.tensors.keeping import keep_now
from tests.tensors.test_leases import World


def spec(num_bytes: int) -> TensorSpec:
    return TensorSpec(np.dtype(np.uint8), (num_bytes,))


def placed(payload: Payload, spec: TensorSpec, offset: int, field: str = "x") -> IncomingTensor:
    (tensor,) = tensors_in(payload, [(field, spec, offset)])
    return tensor


class Received:
    """A payload of `size` bytes that the call owns, with an opener."""

    def __init__(self, size: int = 256, segments: list[PayloadSegment] | None = None) -> None:
        self.budget = Budget(1 << 20, "bytes")
        self.reservation = Reservation(self.budget)
        self.reservation.grow(size)
        self.times_done = 0
        self.memory: NDArray[np.uint8] = np.arange(size).astype(np.uint8)
        self.payload = Payload(segments or [PayloadSegment(0, self.memory)], self.reservation, self._done)
        host = CpuDevice(BufferPool(0))
        self.store = World().store
        self.opener = TensorOpener(self.store, Residence(host, host, InlineCompute()), InlineCompute())

    def _done(self) -> None:
        self.times_done += 1

    def attached(self, num_bytes: int, offset: int, field: str = "x") -> Attached:
        tensor = placed(self.payload, spec(num_bytes), offset, field)
        assert isinstance(tensor, Attached)
        return tensor

    def open(self, *tensors: IncomingTensor) -> AbstractAsyncContextManager[IncomingTensors]:
        return self.opener.open(IncomingTensors(tensors, self.payload))


MALFORMED = {
    "misaligned": ([(8, 1)], "expected a multiple of 64, got 1"),
    "misaligned for a line": ([(8, 32)], "expected a multiple of 64, got 32"),
    "beyond the end": ([(193, 64)], "expected 193 bytes within one segment of the payload, got an offset of 64 where"),
    "begins at the end": ([(1, 256)], "where the segment ends at 256"),
    "far beyond": ([(8, (1 << 64) - 64)], "within one segment"),
    "larger than all": ([((1 << 63) - 1, 0)], "within one segment"),
    "twice": ([(64, 64), (64, 64)], "do not overlap"),
    "into the next": ([(64, 64), (65, 0)], "do not overlap"),
    "into the last": ([(65, 0), (64, 64)], "do not overlap"),
    "around": ([(64, 64), (256, 0)], "do not overlap"),
    "within": ([(256, 0), (8, 64)], "do not overlap"),
}


@pytest.mark.parametrize(("places", "message"), list(MALFORMED.values()), ids=list(MALFORMED))
def test_where_no_tensor_can_be(places: list[tuple[int, int]], message: str) -> None:
    payload = Received().payload
    *first, last = [placed(payload, spec(num_bytes), offset) for num_bytes, offset in places]
    assert not any(isinstance(each, Malformed) for each in first)
    assert isinstance(last, Malformed)
    assert last.fault is not None
    assert message in last.fault.message
    assert last.fault.field == ".payload_offset"


def test_tensors_side_by_side_in_any_order() -> None:
    received = Received()
    found = {offset: received.attached(64, offset).array for offset in (128, 0, 192, 64)}
    assert {offset: int(array[0]) for offset, array in found.items()} == {0: 0, 64: 64, 128: 128, 192: 192}
    assert isinstance(placed(received.payload, spec(1), 64), Malformed)


def test_empty_tensors_take_no_place() -> None:
    received = Received(128)
    places = [(0, 0), (64, 0), (0, 0), (0, 64), (64, 64), (0, 128)]
    assert [received.attached(*place).array.size for place in places] == [0, 64, 0, 0, 64, 0]


def test_very_many_in_descending_order_are_refused_before_they_take_long() -> None:
    received = Received(64 * 10_000)
    references = [placed(received.payload, spec(1), 64 * index) for index in range(9_999, -1, -1)]
    malformed = [each for each in references if isinstance(each, Malformed)]
    assert len(malformed) == 10_000 - 4096 - 1
    assert "at most 4096 tensors that are not in the order of the payload" in str(malformed[0].fault)


def test_tensors_do_not_lie_across_segments() -> None:
    memory = np.zeros(128, np.uint8)
    payload = Payload([PayloadSegment(0, memory[:64]), PayloadSegment(64, memory[64:], is_live=True)], None)
    assert isinstance(placed(payload, spec(128), 0), Malformed)
    assert isinstance(placed(payload, spec(64), 0), Attached)
    assert isinstance(placed(payload, spec(64), 64), Live)


def test_between_segments_there_is_nothing() -> None:
    memory = np.zeros(64, np.uint8)
    payload = Payload([PayloadSegment(64, memory), PayloadSegment(256, memory)], None)
    for offset in (0, 128, 192):
        assert isinstance(placed(payload, spec(1), offset), Malformed)


@pytest.mark.parametrize("offset", [0, 64])
@pytest.mark.parametrize("num_bytes", [0, 8])
def test_without_a_payload(num_bytes: int, offset: int) -> None:
    assert isinstance(placed(NO_PAYLOAD, spec(num_bytes), offset), Malformed)


def test_dtype_and_shape() -> None:
    received = Received(24)
    reference = placed(received.payload, TensorSpec(np.dtype(np.int16), (3, 4)), 0)
    assert isinstance(reference, Attached)
    assert (reference.array.dtype, reference.array.shape) == (np.dtype(np.int16), (3, 4))
    assert reference.array.tobytes() == received.memory.tobytes()


async def test_it_is_free_once_all_was_opened_and_closed() -> None:
    received = Received()
    first, second = received.attached(64, 0), received.attached(64, 64)
    async with received.open(first):
        assert received.budget.used == 256
    assert received.times_done == 0, "the other one was not opened yet"
    async with received.open(second):
        received.payload.close()
        assert (received.times_done, received.budget.used) == (0, 256), "somebody reads it"
    assert (received.times_done, received.budget.used) == (1, 0)
    received.payload.close()
    assert received.times_done == 1


def test_it_is_free_when_the_call_ends_without_having_opened_it() -> None:
    received = Received()
    received.attached(64, 0)
    received.payload.close()
    assert (received.times_done, received.budget.used) == (1, 0)


async def test_the_last_of_several_blocks_frees_it() -> None:
    received = Received(128)
    first, second = received.attached(64, 0), received.attached(64, 64)
    async with received.open(first):
        async with received.open(second):
            pass
        assert received.times_done == 0
    assert received.times_done == 1


async def test_an_error_in_the_block_frees_it_too() -> None:
    received = Received(64)
    with pytest.raises(ZeroDivisionError):
        async with received.open(received.attached(64, 0)):
            _ = 1 // 0
    assert received.times_done == 1


async def test_memory_that_a_sum_takes_over_is_not_freed() -> None:
    received = Received(128)
    owner = Reservation(received.budget)
    references = [received.attached(64, 0), received.attached(64, 64, "y")]
    async with received.open(*references) as opened:
        assert opened.exclusive
        (memory,) = opened.memory
        owner.take_over(128, memory)
        assert received.budget.used == 128
    assert (received.times_done, received.budget.used) == (1, 128)


def received_with_live(size: int, num_live: int) -> tuple[Received, NDArray[np.uint8]]:
    """Returns a payload of which the client has lent the last bytes, and those."""
    memory = np.zeros(num_live, np.uint8)
    segments = [PayloadSegment(0, np.zeros(size, np.uint8)), PayloadSegment(size, memory, is_live=True)]
    return Received(size, segments), memory


async def test_what_a_call_may_not_take_over() -> None:
    received = Received(64)
    (handle,) = keep_now(received.store, [np.zeros(1)], None, shared=True)
    async with received.open(received.attached(64, 0), Stored("y", handle)) as opened:
        assert not opened.exclusive, "beside a stored one"
    received, _ = received_with_live(64, 64)
    lent = placed(received.payload, spec(64), 64, "y")
    opening = received.opener.open(IncomingTensors([received.attached(64, 0), lent], received.payload), in_place=["y"])
    async with opening as opened:
        assert not opened.exclusive, "beside a live one"
    received = Received(128)
    async with received.open(received.attached(64, 0)) as opened:
        assert not opened.exclusive, "padded"


async def test_a_part_of_a_payload_is_copied_so_that_the_rest_is_not_kept() -> None:
    received = Received(1024)
    async with received.open(received.attached(64, 0)) as opened:
        array = opened.arrays()["x"]
        assert not np.shares_memory(array, received.memory)
        assert array.tobytes() == received.memory[:64].tobytes()


async def test_gaps_between_tensors_are_no_reason_to_copy() -> None:
    received = Received(64 + 1)
    references = [received.attached(1, 0), received.attached(1, 64, "y")]
    async with received.open(*references) as opened:
        assert np.shares_memory(opened.arrays()["x"], received.memory)


@pytest.mark.parametrize("in_place", [True, False])
async def test_what_a_client_can_change_is_copied_unless_asked_for_in_place(in_place: bool) -> None:
    received, memory = received_with_live(0, 8)
    tensors = IncomingTensors([placed(received.payload, spec(8), 0)], received.payload)
    async with received.opener.open(tensors, in_place=["x"] if in_place else []) as opened:
        assert opened.is_live is in_place
        memory[:] = 9
        assert opened.arrays()["x"].tolist() == [9 if in_place else 0] * 8
        assert opened.memory == ()
        assert opened.lenders == (received.payload,)
