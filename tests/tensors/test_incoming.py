"""Tensors of requests opened: no socket, no protobuf."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.device import CpuDevice
from gradserve_server.errors import InvalidArgumentError, NotFoundError
from gradserve_server.resources.budget import Budget, Reservation
from gradserve_server.resources.memory import Room
from gradserve_server.tensors.held import Residence
from gradserve_server.tensors.incoming import (
    IncomingTensor,
    IncomingTensors,
    Inline,
    Malformed,
    Stored,
    TensorOpener,
)
from gradserve_server.tensors.payload import NO_PAYLOAD, Payload
from gradserve_server.tensors.spec import Fault, TensorSpec
from tests.accumulators.gradients import named
from tests.servers.separate_device import SeparateDevice
from tests.tensors.keeping import keep_now
from tests.tensors.test_leases import DEFAULT_LEASE, BoomError, World

F32 = np.dtype(np.float32)
ONES: NDArray[Any] = np.ones(3, F32)
ROOM = Room(Reservation(Budget(0, "bytes")))


def inline(array: Any) -> IncomingTensor:
    return Inline("", array)


def malformed(message: str, field: str = "") -> IncomingTensor:
    return Malformed("", fault=Fault(message, field))


def incoming(tensors: Mapping[str, IncomingTensor], payload: Payload = NO_PAYLOAD) -> IncomingTensors:
    """Returns the tensors of a request with these fields."""
    return IncomingTensors([named(each, field) for field, each in tensors.items()], payload)


def read(opened: IncomingTensors, field: str) -> Any:
    (found,) = [each for each in opened if each.field == field]
    return found.read()


class Opening:
    """A store with an opener, on a device with memory of its own."""

    def __init__(self) -> None:
        self.world = World()
        self.device = SeparateDevice()
        host = CpuDevice(BufferPool(0))
        self.opener = TensorOpener(self.world.store, Residence(host, self.device, InlineCompute()), InlineCompute())

    def open(
        self, tensors: Mapping[str, IncomingTensor], *, release: bool = False, on_host: bool = False
    ) -> AbstractAsyncContextManager[IncomingTensors]:
        return self.opener.open(incoming(tensors), release=release, on_host=on_host)

    def keep(self, array: Any = None, *, shared: bool = False) -> Stored:
        (handle,) = keep_now(self.world.store, [ONES if array is None else array], None, shared=shared)
        return Stored("", handle)

    def on_device(self) -> Any:
        with self.device.computing():
            return self.device.from_host(ONES)

    async def array_of(self, stored: Stored) -> Any:
        async with self.open({"x": stored}) as opened:
            return read(opened, "x")


@pytest.fixture
def opening() -> Opening:
    return Opening()


async def test_inline_and_stored_are_known_by_their_paths(opening: Opening) -> None:
    stored = opening.keep(np.zeros(2, F32))
    async with opening.open({"x": inline(ONES), "w[1]": stored}) as opened:
        assert read(opened, "x") is ONES
        assert list(opened.arrays()) == ["x", "w[1]"]
        assert read(opened, "w[1]").tolist() == [0, 0]
        assert [each.is_stored for each in opened] == [False, True]


async def test_what_is_stored_is_found_before_anything_is_looked_at(opening: Opening) -> None:
    references: dict[str, IncomingTensor] = {"x": malformed("wrong"), "y": opening.keep(), "z": Stored("", "nowhere")}
    with pytest.raises(NotFoundError, match="no tensor with the handle 'nowhere'") as error:
        async with opening.open(references):
            pass
    assert error.value.field == "z.handle"


@pytest.mark.parametrize(
    ("spec", "message", "field"),
    [
        (TensorSpec(F32, (4,)), r"expected the stored tensor's shape \[3\] of float32, got \[4\] of float32", "x"),
        (TensorSpec(np.dtype(np.int8), (3,)), r"got \[3\] of int8", "x"),
    ],
)
async def test_what_is_said_of_a_stored_tensor_must_be_true(
    opening: Opening, spec: Any, message: str, field: str
) -> None:
    async with opening.open({"x": Stored("", opening.keep().handle, spec)}) as opened:
        with pytest.raises(InvalidArgumentError, match=message) as error:
            read(opened, "x")
        assert error.value.field == field


async def test_the_truth_may_be_said_of_a_stored_tensor(opening: Opening) -> None:
    async with opening.open({"x": Stored("", opening.keep().handle, TensorSpec(F32, (3,)))}) as opened:
        assert read(opened, "x") is ONES


async def test_the_malformed_fails_when_it_is_looked_at(opening: Opening) -> None:
    for _ in range(2):
        async with opening.open({"x": inline(ONES), "y": malformed("too short", ".content")}) as opened:
            assert read(opened, "x") is ONES
            with pytest.raises(InvalidArgumentError, match="too short") as error:
                opened.arrays()
            assert error.value.field == "y.content"


async def test_use_renews_the_lease(opening: Opening) -> None:
    stored = opening.keep()
    for _ in range(3):
        assert opening.world.after(DEFAULT_LEASE * 0.9) == 0
        assert await opening.array_of(stored) is ONES
    assert opening.world.after(DEFAULT_LEASE * 1.1) == 1


async def test_release_deletes_what_is_stored(opening: Opening) -> None:
    async with opening.open({"x": opening.keep(), "y": inline(ONES)}, release=True) as opened:
        assert opened.exclusive
        assert opening.world.used == (ONES.nbytes, 1)
    assert opening.world.used == (0, 0)


async def test_released_tensors_are_there_again_after_an_error(opening: Opening) -> None:
    stored = opening.keep()
    with pytest.raises(BoomError):
        async with opening.open({"x": stored}, release=True):
            raise BoomError
    assert await opening.array_of(stored) is ONES


Open = Callable[[Opening, Stored], dict[str, IncomingTensor]]


@pytest.mark.parametrize(
    ("references", "release"),
    [
        (lambda _, stored: {"x": stored}, False),
        (lambda _, stored: {"x": stored, "y": stored}, True),
        (lambda opening, stored: {"x": stored, "y": opening.keep(shared=True)}, True),
        (lambda _, stored: {"x": inline(ONES)}, True),
    ],
    ids=["not released", "named twice", "shared", "inline"],
)
async def test_what_a_call_may_not_write_to(opening: Opening, references: Open, release: bool) -> None:
    stored = opening.keep()
    async with opening.open(references(opening, stored), release=release) as opened:
        assert not opened.exclusive


async def test_what_another_call_uses_is_nobodys_own(opening: Opening) -> None:
    stored = opening.keep()
    async with opening.open({"x": stored}), opening.open({"x": stored}, release=True) as second:
        assert not second.exclusive


async def test_what_a_call_shares_stays_shared(opening: Opening) -> None:
    stored = opening.keep()
    async with opening.open({"x": stored}) as opened:
        opened.share()
        opened.relocate({"x": ONES.copy(), "not stored": ONES}, ROOM)
    async with opening.open({"x": stored}, release=True) as released:
        assert not released.exclusive


async def test_it_is_shared_also_while_a_call_that_fails_later_hides_it(opening: Opening) -> None:
    stored = opening.keep()
    async with opening.open({"x": stored}) as opened:
        with suppress(BoomError):
            async with opening.open({"x": stored}, release=True):
                opened.share()
                raise BoomError
    async with opening.open({"x": stored}, release=True) as released:
        assert not released.exclusive


async def test_a_copy_takes_the_place_of_a_stored_tensor(opening: Opening) -> None:
    stored, copy = opening.keep(shared=True), ONES.copy()
    async with opening.open({"x": stored, "y": inline(ONES)}) as opened:
        opened.relocate({"x": copy, "y": copy}, ROOM)
        assert read(opened, "x") is copy
        assert read(opened, "y") is ONES
    async with opening.open({"x": stored}, release=True) as released:
        assert read(released, "x") is copy
        assert released.exclusive
    assert opening.world.used == (0, 0)


async def test_what_is_needed_on_the_host_is_brought_there_once(opening: Opening) -> None:
    stored, here = opening.keep(opening.on_device(), shared=True), opening.keep()
    for _ in range(2):
        async with opening.open({"x": stored, "y": here, "z": inline(ONES)}, on_host=True) as opened:
            assert read(opened, "x").tolist() == [1, 1, 1]
            assert read(opened, "y") is ONES
    assert opening.device.copied_out == ONES.nbytes
    async with opening.open({"x": stored}, release=True) as released:
        assert released.exclusive, "nobody else has the copy"


async def test_it_stays_on_the_host_for_a_call_while_an_op_moves_it_back(opening: Opening) -> None:
    stored = opening.keep(opening.on_device())
    async with opening.open({"x": stored}) as of_op, opening.open({"x": stored}, on_host=True) as of_apply:
        of_op.relocate({"x": opening.on_device()}, ROOM)
        assert isinstance(read(of_apply, "x"), np.ndarray)
        assert not of_apply.exclusive
    assert not isinstance(await opening.array_of(stored), np.ndarray)
