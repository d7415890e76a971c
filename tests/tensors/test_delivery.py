"""Results delivered: no socket, no protobuf."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.device import CpuDevice
from gradserve_server.errors import InvalidArgumentError, ResourceExhaustedError
from gradserve_server.resources.budget import Reservation
from gradserve_server.resources.memory import Sizes
from gradserve_server.tensors.delivery import (
    Delivered,
    Delivery,
    DeliveryLimits,
    Placement,
    PlacementMode,
    TensorDeliverer,
)
from gradserve_server.tensors.references import Inline, Stored
from gradserve_server.tensors.residence import Residence
from gradserve_server.tensors.spec import TensorSpec
from tests.servers.separate_device import SeparateDevice
from tests.tensors.test_leases import DEFAULT_LEASE, BoomError, World

KEEP, AUTO = Placement(PlacementMode.KEEP), Placement(PlacementMode.AUTO)
SMALL, LARGE, TOO_LARGE = (np.ones(count, np.float32) for count in (2, 4, 8))
LIMITS = DeliveryLimits(small=8, message=16)
NUM_HANDLES = 5


class Delivering:
    """A store with a deliverer, on a device with memory of its own."""

    def __init__(self) -> None:
        self.world = World()
        self.device = SeparateDevice()
        residence = Residence(CpuDevice(BufferPool(0)), self.device, InlineCompute())
        self.begin = TensorDeliverer(self.world.store, residence, self.world.memory, LIMITS).begin

    def deliver(self, placement: Placement, *arrays: Any, shared: bool = False) -> list[Delivered]:
        with self.begin(placement) as delivery:
            return delivery.deliver(arrays, shared=shared)

    def stored(self, delivered: Delivered) -> Any:
        assert isinstance(delivered, Stored)
        with self.world.store.use([delivered.handle]) as held:
            return held.arrays[delivered.handle]


@pytest.fixture
def delivering() -> Delivering:
    return Delivering()


def arrays_of(delivered: Sequence[Delivered]) -> list[Any]:
    return [each.array if isinstance(each, Inline) else None for each in delivered]


@pytest.mark.parametrize(
    ("placement", "arrays", "inline"),
    [
        (Placement(), [LARGE], True),
        (AUTO, [SMALL], True),
        (AUTO, [SMALL, SMALL], False),
        (AUTO, [LARGE], False),
        (KEEP, [SMALL], False),
        (KEEP, [], False),
    ],
)
def test_where_results_go(delivering: Delivering, placement: Placement, arrays: list[Any], inline: bool) -> None:
    delivered = delivering.deliver(placement, *arrays)
    if inline:
        assert arrays_of(delivered) == arrays
        assert delivering.world.used == (0, 0)
    else:
        assert all(delivering.stored(each) is array for each, array in zip(delivered, arrays, strict=True))
        assert delivering.world.used == (sum(array.nbytes for array in arrays), len(arrays))


def test_of_what_is_kept_the_spec_is_known(delivering: Delivering) -> None:
    (kept,) = delivering.deliver(KEEP, SMALL)
    assert isinstance(kept, Stored)
    assert kept.spec == TensorSpec(np.dtype(np.float32), (2,))


def test_too_long_for_a_message(delivering: Delivering) -> None:
    with pytest.raises(ResourceExhaustedError, match="has 32 bytes, but at most 16 come inline") as error:
        delivering.deliver(Placement(), TOO_LARGE)
    assert error.value.field == "placement.mode"
    delivering.deliver(AUTO, TOO_LARGE)


def test_the_first_size_decides(delivering: Delivering) -> None:
    with delivering.begin(AUTO) as delivery:
        assert delivery.keeps(9)
        assert delivery.keeps(1)
        assert isinstance(delivery.deliver([SMALL], shared=False)[0], Stored)
    with delivering.begin(AUTO) as delivery:
        assert not delivery.keeps(8)
        assert arrays_of(delivery.deliver([LARGE], shared=False)) == [LARGE]


@pytest.mark.parametrize("lease", [0.0, -1.0])
def test_the_lease_is_checked_before_anything_is_done(delivering: Delivering, lease: float) -> None:
    with (
        pytest.raises(InvalidArgumentError, match="positive lease") as error,
        delivering.begin(Placement(PlacementMode.KEEP, lease)),
    ):
        pytest.fail("begun")
    assert error.value.field == "placement.lease"


@pytest.mark.parametrize(("lease", "lives"), [(None, DEFAULT_LEASE), (3.0, 3.0)])
def test_what_is_kept_has_a_lease(delivering: Delivering, lease: float | None, lives: float) -> None:
    delivering.deliver(Placement(PlacementMode.KEEP, lease), SMALL)
    assert delivering.world.after(lives * 0.9) == 0
    assert delivering.world.after(lives * 0.2) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_shared_nobody_takes_over(delivering: Delivering, shared: bool) -> None:
    (kept,) = delivering.deliver(KEEP, SMALL, shared=shared)
    assert isinstance(kept, Stored)
    with delivering.world.store.use([kept.handle], release=True) as held:
        assert held.exclusive is not shared


def fail(delivery: Delivery) -> None:
    raise BoomError


def take_all_handles(delivery: Delivery) -> None:
    delivery.deliver([SMALL] * NUM_HANDLES, shared=False)


def take_all_memory(delivery: Delivery) -> None:
    delivery.deliver([np.zeros(1000, np.int8)], shared=False)


@pytest.mark.parametrize("failure", [fail, take_all_handles, take_all_memory])
def test_nothing_is_left_of_a_call_that_fails_part_way(
    delivering: Delivering, failure: Callable[[Delivery], None]
) -> None:
    def call() -> None:
        with delivering.begin(KEEP) as delivery:
            delivery.room.grow(Sizes(100))
            delivery.deliver([SMALL, LARGE], shared=False)
            assert delivering.world.used == (100, 2)
            failure(delivery)

    with pytest.raises((BoomError, ResourceExhaustedError)):
        call()
    assert delivering.world.used == (0, 0)
    assert delivering.world.store.page(0, 10) == []


def test_what_was_reserved_becomes_the_stores(delivering: Delivering) -> None:
    memory = delivering.world.memory
    memory.limit = 40
    with delivering.begin(KEEP) as delivery:
        delivery.room.grow(Sizes(40))
        delivery.deliver([SMALL, LARGE], shared=False)
        assert memory.used == 40, "at no time has anybody else a chance"
        assert delivery.room.used == 16
    assert memory.used == 24


def test_what_was_reserved_for_an_inline_result_is_given_back(delivering: Delivering) -> None:
    with delivering.begin(Placement()) as delivery:
        delivery.room.grow(Sizes(16))
        delivery.deliver([LARGE], shared=False)
    assert delivering.world.used == (0, 0)


def test_a_part_of_an_reservation(delivering: Delivering) -> None:
    memory = delivering.world.memory
    reservation = Reservation(memory)
    reservation.grow(10)
    part = reservation.split(4)
    assert (reservation.used, part.used, memory.used) == (6, 4, 10)
    part.settle(0)
    assert (reservation.used, memory.used) == (6, 6)


def test_a_holder_takes_over_what_another_reserved(delivering: Delivering) -> None:
    memory = delivering.world.memory
    giver, taker = Reservation(memory), Reservation(memory)
    giver.grow(10)
    taker.take_over(4, giver)
    assert (giver.used, taker.used, memory.used) == (6, 4, 10)
    with pytest.raises(ResourceExhaustedError):
        taker.take_over(memory.limit, giver)
    assert (giver.used, taker.used, memory.used) == (6, 4, 10)


@pytest.mark.parametrize(("placement", "copied_out"), [(Placement(), LARGE.nbytes), (KEEP, 0)])
async def test_what_lies_on_the_device_travels_only_inline(
    delivering: Delivering, placement: Placement, copied_out: int
) -> None:
    with delivering.device.computing():
        array = delivering.device.from_host(LARGE)
    with delivering.begin(placement) as delivery:
        (delivered,) = await delivery.deliver_from_anywhere([array], shared=False)
    assert delivering.device.copied_out == copied_out
    if isinstance(delivered, Inline):
        assert np.array_equal(delivered.array, LARGE)
    else:
        assert delivering.stored(delivered) is array


def test_results_by_name(delivering: Delivering) -> None:
    with delivering.begin(Placement()) as delivery:
        delivered = delivery.deliver_named({"y": SMALL, "z": SMALL})
    assert {name: arrays_of([each]) for name, each in delivered.items()} == {"y": [SMALL], "z": [SMALL]}
