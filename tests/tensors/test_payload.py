"""The payload beside a message: where tensors may be, who uses them, and when its memory is free."""

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.device import CpuDevice
from gradserve_server.resources.budget import Budget, Reservation
from gradserve_server.tensors.opening import TensorOpener
from gradserve_server.tensors.references import (
    NO_PAYLOAD,
    Attached,
    Live,
    Malformed,
    Payload,
    PayloadSegment,
    Reference,
    Stored,
)
from gradserve_server.tensors.residence import Residence
from gradserve_server.tensors.spec import TensorSpec
from tests.tensors.keeping import keep_now
from tests.tensors.test_leases import World


def spec(num_bytes: int) -> TensorSpec:
    return TensorSpec(np.dtype(np.uint8), (num_bytes,))


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
        self.opener = TensorOpener(World().store, Residence(host, host, InlineCompute()))

    def _done(self) -> None:
        self.times_done += 1

    def attached(self, num_bytes: int, offset: int) -> Attached:
        reference = self.payload.reference(spec(num_bytes), offset)
        assert isinstance(reference, Attached)
        return reference


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
    *first, last = [payload.reference(spec(num_bytes), offset) for num_bytes, offset in places]
    assert not any(isinstance(each, Malformed) for each in first)
    assert isinstance(last, Malformed)
    assert message in last.message
    assert last.field == ".payload_offset"


def test_tensors_side_by_side_in_any_order() -> None:
    received = Received()
    found = {offset: received.attached(64, offset).array for offset in (128, 0, 192, 64)}
    assert {offset: int(array[0]) for offset, array in found.items()} == {0: 0, 64: 64, 128: 128, 192: 192}
    assert isinstance(received.payload.reference(spec(1), 64), Malformed)


def test_empty_tensors_take_no_place() -> None:
    received = Received(128)
    places = [(0, 0), (64, 0), (0, 0), (0, 64), (64, 64), (0, 128)]
    assert [received.attached(*place).array.size for place in places] == [0, 64, 0, 0, 64, 0]


def test_very_many_in_descending_order_are_refused_before_they_take_long() -> None:
    received = Received(64 * 10_000)
    references = [received.payload.reference(spec(1), 64 * index) for index in range(9_999, -1, -1)]
    malformed = [each for each in references if isinstance(each, Malformed)]
    assert len(malformed) == 10_000 - 4096 - 1
    assert "at most 4096 tensors that are not in the order of the payload" in malformed[0].message


def test_tensors_do_not_lie_across_segments() -> None:
    memory = np.zeros(128, np.uint8)
    payload = Payload([PayloadSegment(0, memory[:64]), PayloadSegment(64, memory[64:], is_live=True)], None)
    assert isinstance(payload.reference(spec(128), 0), Malformed)
    assert isinstance(payload.reference(spec(64), 0), Attached)
    assert isinstance(payload.reference(spec(64), 64), Live)


def test_between_segments_there_is_nothing() -> None:
    memory = np.zeros(64, np.uint8)
    payload = Payload([PayloadSegment(64, memory), PayloadSegment(256, memory)], None)
    for offset in (0, 128, 192):
        assert isinstance(payload.reference(spec(1), offset), Malformed)


@pytest.mark.parametrize("offset", [0, 64])
@pytest.mark.parametrize("num_bytes", [0, 8])
def test_without_a_payload(num_bytes: int, offset: int) -> None:
    assert isinstance(NO_PAYLOAD.reference(spec(num_bytes), offset), Malformed)


def test_dtype_and_shape() -> None:
    received = Received(24)
    reference = received.payload.reference(TensorSpec(np.dtype(np.int16), (3, 4)), 0)
    assert isinstance(reference, Attached)
    assert (reference.array.dtype, reference.array.shape) == (np.dtype(np.int16), (3, 4))
    assert reference.array.tobytes() == received.memory.tobytes()


def test_it_is_free_once_all_was_opened_and_closed() -> None:
    received = Received()
    first, second = received.attached(64, 0), received.attached(64, 64)
    with received.opener.open({"x": first}):
        assert received.budget.used == 256
    assert received.times_done == 0, "the other one was not opened yet"
    with received.opener.open({"y": second}):
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


def test_the_last_of_several_blocks_frees_it() -> None:
    received = Received(64)
    reference = received.attached(64, 0)
    with ExitStack() as stack:
        stack.enter_context(received.opener.open({"x": reference}))
        with received.opener.open({"x": reference}):
            pass
        assert received.times_done == 0
    assert received.times_done == 1


def test_an_error_in_the_block_frees_it_too() -> None:
    received = Received(64)
    with pytest.raises(ZeroDivisionError), received.opener.open({"x": received.attached(64, 0)}):
        _ = 1 // 0
    assert received.times_done == 1


def test_memory_that_a_sum_takes_over_is_not_freed() -> None:
    received = Received(128)
    owner = Reservation(received.budget)
    references = {"x": received.attached(64, 0), "y": received.attached(64, 64)}
    with received.opener.open(references) as opened:
        assert opened.exclusive
        (memory,) = opened.memory
        owner.take_over(128, memory)
        assert received.budget.used == 128
    assert (received.times_done, received.budget.used) == (1, 128)


def live(size: int) -> tuple[Reference, NDArray[np.uint8]]:
    memory = np.zeros(size, np.uint8)
    return Payload([PayloadSegment(0, memory, is_live=True)], None).reference(spec(size), 0), memory


def references_of(received: Received, which: str) -> dict[str, Reference]:
    references: dict[str, Any] = {"x": received.attached(64, 0)}
    match which:
        case "beside a stored one":
            references["y"] = Stored(keep_now(received.opener._store, [np.zeros(1)], None, shared=True)[0])
        case "beside a live one":
            references["y"], _ = live(64)
    return references


@pytest.mark.parametrize(("size", "which"), [(64, "beside a stored one"), (64, "beside a live one"), (128, "padded")])
def test_what_a_call_may_not_take_over(size: int, which: str) -> None:
    received = Received(size)
    with received.opener.open(references_of(received, which)) as opened:
        assert not opened.exclusive


def test_a_part_of_a_payload_is_copied_so_that_the_rest_is_not_kept() -> None:
    received = Received(1024)
    with received.opener.open({"x": received.attached(64, 0)}) as opened:
        array = opened["x"]
        assert not np.shares_memory(array, received.memory)
        assert array.tobytes() == received.memory[:64].tobytes()


def test_gaps_between_tensors_are_no_reason_to_copy() -> None:
    received = Received(64 + 1)
    references = {"x": received.attached(1, 0), "y": received.attached(1, 64)}
    with received.opener.open(references) as opened:
        assert np.shares_memory(opened["x"], received.memory)


async def test_what_a_client_can_change_is_copied_unless_asked_for_in_place() -> None:
    received = Received(64)
    reference, memory = live(8)
    with received.opener.open({"x": reference}) as opened:
        copy = opened["x"]
        assert opened.is_live("x")
        assert opened.in_place("x").base is not None
        memory[:] = 9
        assert copy.tolist() == [0] * 8
        assert opened.in_place("x").tolist() == [9] * 8
        await opened.copy_live(["x"])
        memory[:] = 1
        assert not opened.is_live("x")
        assert opened["x"].tolist() == opened.in_place("x").tolist() == [9] * 8
        assert opened.memory == ()
