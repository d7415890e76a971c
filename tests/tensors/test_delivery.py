"""The tensors of replies: inline, attached or kept; without a socket."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradserve_protocol.memory.pool import BufferPool
from gradserve_protocol.messages import encode_duration
from gradserve_protocol.tensors import Contents
from gradserve_protocol.v1 import tensor_messages_pb2, tensor_pb2
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.device import CpuDevice
from gradserve_server.errors import InvalidArgumentError, ResourceExhaustedError
from gradserve_server.resources.budget import Reservation
from gradserve_server.resources.memory import Memory, Sizes
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.tensors.messages import InlineLimits, OutgoingTensors, TensorDeliverer, encode_handle
from gradserve_server.tensors.held import Residence
from tests.servers.separate_device import SeparateDevice
from tests.tensors.test_leases import DEFAULT_LEASE, BoomError, World

Placement = tensor_pb2.Placement
INLINE, KEEP, AUTO = (
    Placement(mode=mode) for mode in (Placement.MODE_INLINE, Placement.MODE_KEEP, Placement.MODE_AUTO)
)
SMALL, LARGE, TOO_LARGE = (np.ones(count, np.float32) for count in (2, 4, 8))
LIMITS = InlineLimits(small=8, message=16)
NUM_HANDLES = 5
CALL, ATTACHING = Call("a call"), Call("a call on a socket", carries_results=True)
Response = tensor_messages_pb2.ReadTensorsResponse


class Delivering:
    """A store with a deliverer, on a device with memory of its own."""

    def __init__(self) -> None:
        self.world = World()
        self.device = SeparateDevice()
        residence = Residence(CpuDevice(BufferPool(0)), self.device, InlineCompute())
        self.deliverer = TensorDeliverer(
            self.world.store, residence, InlineCompute(), Memory(self.world.memory), LIMITS
        )

    def begin(self, placement: Placement, call: Call = CALL) -> OutgoingTensors:
        return self.deliverer.begin(placement, call)

    async def deliver(
        self, placement: Placement, *arrays: Any, shared: bool = False, call: Call = CALL
    ) -> list[tensor_pb2.Tensor]:
        """Returns the tensors of the reply."""
        with self.begin(placement, call) as outgoing:
            await outgoing.add(arrays, shared=shared)
            return await tensors_of(outgoing)

    async def stored(self, tensor: tensor_pb2.Tensor) -> Any:
        assert tensor.WhichOneof("data") == "handle"
        async with self.world.store.use([tensor.handle]) as held:
            return held.arrays[tensor.handle]


async def tensors_of(outgoing: OutgoingTensors, contents: Contents | None = None) -> list[tensor_pb2.Tensor]:
    reply = await outgoing.reply(Response(), lambda tensors: [Response(tensors=tensors)], contents)
    return list(Response.FromString(reply.message.SerializeToString()).tensors)


@pytest.fixture
def delivering() -> Delivering:
    return Delivering()


def contents_of(tensors: Sequence[tensor_pb2.Tensor]) -> list[bytes]:
    return [each.content for each in tensors]


@pytest.mark.parametrize(
    ("placement", "call", "arrays", "leaves"),
    [
        (Placement(), CALL, [LARGE], True),
        (INLINE, CALL, [LARGE], True),
        (AUTO, CALL, [SMALL], True),
        (AUTO, CALL, [SMALL, SMALL], False),
        (AUTO, CALL, [LARGE], False),
        (KEEP, CALL, [SMALL], False),
        (KEEP, CALL, [], False),
        (Placement(), ATTACHING, [TOO_LARGE], True),
        (AUTO, ATTACHING, [TOO_LARGE], True),
        (KEEP, ATTACHING, [TOO_LARGE], False),
    ],
)
async def test_where_results_go(
    delivering: Delivering, placement: Placement, call: Call, arrays: list[Any], leaves: bool
) -> None:
    tensors = await delivering.deliver(placement, *arrays, call=call)
    if leaves:
        assert contents_of(tensors) == [array.tobytes() for array in arrays]
        assert delivering.world.used == (0, 0)
    else:
        assert all([await delivering.stored(each) is array for each, array in zip(tensors, arrays, strict=True)])
        assert delivering.world.used == (sum(array.nbytes for array in arrays), len(arrays))


async def test_of_what_is_kept_the_spec_is_sent(delivering: Delivering) -> None:
    (kept,) = await delivering.deliver(KEEP, SMALL)
    assert kept == encode_handle(SMALL, kept.handle)


@pytest.mark.parametrize("call", [CALL, ATTACHING])
async def test_any_number_of_results(delivering: Delivering, call: Call) -> None:
    arrays = [np.full((), number, np.uint16) for number in range(2000)]
    delivering.deliverer = replace(delivering.deliverer, limits=InlineLimits(4000, 4000))
    tensors = await delivering.deliver(Placement(), *arrays, call=call)
    assert contents_of(tensors) == [array.tobytes() for array in arrays]


async def test_many_large_results_are_beside_the_reply(delivering: Delivering) -> None:
    arrays, contents = [np.full(1024, number, np.float32) for number in range(600)], Contents()
    with delivering.begin(Placement(), ATTACHING) as outgoing:
        await outgoing.add(arrays)
        tensors = await tensors_of(outgoing, contents)
    at_once = Contents()
    assert tensors == at_once.tensors(arrays)
    assert contents == at_once


def test_an_unknown_mode_is_refused(delivering: Delivering) -> None:
    placement = Placement.FromString(b"\x08\x63")
    with pytest.raises(InvalidArgumentError, match="expected a known placement mode, got 99") as error:
        delivering.begin(placement)
    assert error.value.field == "placement.mode"


async def test_too_long_for_a_message(delivering: Delivering) -> None:
    with pytest.raises(ResourceExhaustedError, match="has 32 bytes, but at most 16 come inline") as error:
        await delivering.deliver(Placement(), TOO_LARGE)
    assert error.value.field == "placement.mode"
    await delivering.deliver(AUTO, TOO_LARGE)


async def test_the_first_size_decides(delivering: Delivering) -> None:
    with delivering.begin(AUTO) as outgoing:
        assert outgoing.keeps(9)
        assert outgoing.keeps(1)
        await outgoing.add([SMALL])
        assert len(outgoing.handles) == 1
    with delivering.begin(AUTO) as outgoing:
        assert not outgoing.keeps(8)
        await outgoing.add([LARGE])
        assert contents_of(await tensors_of(outgoing)) == [LARGE.tobytes()]


def kept_for(lease: float | None) -> Placement:
    return Placement(mode=Placement.MODE_KEEP, lease=None if lease is None else encode_duration(lease))


@pytest.mark.parametrize("lease", [0.0, -1.0])
def test_the_lease_is_checked_before_anything_is_done(delivering: Delivering, lease: float) -> None:
    with (
        pytest.raises(InvalidArgumentError, match="positive lease") as error,
        delivering.begin(kept_for(lease)),
    ):
        pytest.fail("begun")
    assert error.value.field == "placement.lease"


@pytest.mark.parametrize(("lease", "lives"), [(None, DEFAULT_LEASE), (3.0, 3.0)])
async def test_what_is_kept_has_a_lease(delivering: Delivering, lease: float | None, lives: float) -> None:
    await delivering.deliver(kept_for(lease), SMALL)
    assert delivering.world.after(lives * 0.9) == 0
    assert delivering.world.after(lives * 0.2) == 1


@pytest.mark.parametrize("shared", [False, True])
async def test_what_is_shared_nobody_takes_over(delivering: Delivering, shared: bool) -> None:
    (kept,) = await delivering.deliver(KEEP, SMALL, shared=shared)
    async with delivering.world.store.use([kept.handle], release=True) as held:
        assert held.exclusive is not shared


async def fail(_: OutgoingTensors) -> None:
    raise BoomError


async def take_all_handles(outgoing: OutgoingTensors) -> None:
    await outgoing.add([SMALL] * NUM_HANDLES)


async def take_all_memory(outgoing: OutgoingTensors) -> None:
    await outgoing.add([np.zeros(1000, np.int8)])


@pytest.mark.parametrize("failure", [fail, take_all_handles, take_all_memory])
async def test_nothing_is_left_of_a_call_that_fails_part_way(
    delivering: Delivering, failure: Callable[[OutgoingTensors], Awaitable[None]]
) -> None:
    async def call() -> None:
        with delivering.begin(KEEP) as outgoing:
            outgoing.room.grow(Sizes(100))
            await outgoing.add([SMALL, LARGE])
            assert delivering.world.used == (100, 2)
            await failure(outgoing)

    with pytest.raises((BoomError, ResourceExhaustedError)):
        await call()
    assert delivering.world.used == (0, 0)
    assert delivering.world.store.page(0, 10) == []


async def test_what_was_reserved_becomes_the_stores(delivering: Delivering) -> None:
    memory = delivering.world.memory
    memory.limit = 40
    with delivering.begin(KEEP) as outgoing:
        outgoing.room.grow(Sizes(40))
        await outgoing.add([SMALL, LARGE])
        assert memory.used == 40, "at no time has anybody else a chance"
        assert outgoing.room.used == 16
    assert memory.used == 24


async def test_what_was_reserved_for_an_inline_result_is_given_back(delivering: Delivering) -> None:
    with delivering.begin(Placement()) as outgoing:
        outgoing.room.grow(Sizes(16))
        await outgoing.add([LARGE])
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
    with delivering.begin(placement) as outgoing:
        await outgoing.add([array])
        (tensor,) = await tensors_of(outgoing)
    assert delivering.device.copied_out == copied_out
    if copied_out:
        assert tensor.content == LARGE.tobytes()
    else:
        assert await delivering.stored(tensor) is array
