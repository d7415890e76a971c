"""Which stored tensors make room on a device, for whom, and what happens to them meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from gradserve_server.devices.device import DeviceFullError
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.resources.budget import Budget, Purpose, Reservation
from gradserve_server.resources.memory import Room
from gradserve_server.security.identity import ANONYMOUS
from tests.tensors.device_memory.world import LEASE, LIMIT, World
from tests.tensors.keeping import keep_now

REFUSED = None
_ADMIN = ANONYMOUS


@pytest.fixture
async def world() -> World:
    return World()


@pytest.mark.parametrize(
    ("stored", "wanted", "moved"),
    [
        ([("", 30), ("", 30), ("", 30)], ("", 10), []),
        ([("", 30), ("", 30), ("", 30)], ("", 40), [0]),
        ([("", 30), ("", 30), ("", 30)], ("", 41), [0, 1]),
        ([("", 30), ("", 30), ("", 30)], ("", 100), [0, 1, 2]),
        ([("", 30), ("", 30), ("", 30)], ("", 101), REFUSED),
        # Who has more than a share makes room first, even with what was used later,
        ([("worker", 10), ("chief", 50), ("chief", 20), ("fourth", 20)], ("third", 20), [1]),
        # and the caller itself where it wants more than its share.
        ([("worker", 20), ("chief", 60)], ("chief", 20), [1]),
        ([("worker", 20), ("chief", 60)], ("chief", 61), REFUSED),
        ([("worker", 20), ("chief", 60)], ("worker", 30), [0, 1]),
        # Where nobody has more than a share, the others make room for a share only.
        ([(name, 20) for name in "abcde"], ("f", 20), [0]),
        ([(name, 20) for name in "abcde"], ("f", 21), REFUSED),
        # Somebody stops making room when nothing but the share is left.
        ([("worker", 11), ("worker", 11), ("chief", 58), ("fourth", 20)], ("third", 20), [0, 2]),
        # An identity's own limit is no reason to move what others have.
        ([("chief", 40), ("limited", 30), ("limited", 10)], ("limited", 11), [1]),
        ([("chief", 40), ("limited", 30)], ("limited", 51), REFUSED),
    ],
)
async def test_who_makes_room(
    world: World, stored: list[tuple[str, int]], wanted: tuple[str, int], moved: list[int] | None
) -> None:
    handles = [world.keep(size, owner, value) for value, (owner, size) in enumerate(stored)]
    name, amount = wanted
    before = sum(size for _, size in stored)
    if moved is REFUSED:
        with pytest.raises(ResourceExhaustedError, match=f"bytes of device memory.*{amount} asked for"):
            await world.take(amount, name)
        assert world.used == (0, before), "nothing moves if it is of no use"
        return
    reservation = await world.take(amount, name)
    assert [index for index, handle in enumerate(handles) if not world.is_on_device(handle)] == moved
    given = sum(stored[index][1] for index in moved)
    assert world.used == (given, before - given + amount)
    for owner in dict(stored):
        on_device = sum(size for index, (who, size) in enumerate(stored) if who == owner and index not in moved)
        own = amount if owner == name else 0
        assert world.budget.held_by(owner) == (on_device + own if owner else 0)
    assert [world.value(handle) for handle in handles] == list(range(len(stored)))
    assert (world.evictor.num_evicted, world.evictor.evicted_bytes) == (len(moved), given)
    reservation.settle(0)
    assert world.store.delete(handles, user=_ADMIN) == len(stored)
    assert world.used == (0, 0)


async def test_what_was_used_last_stays(world: World) -> None:
    first, second, third = (world.keep(30) for _ in range(3))
    async with world.store.use([first]):
        pass
    await world.take(40)
    assert [world.is_on_device(each) for each in (first, second, third)] == [True, False, True]


async def test_what_is_in_use_stays(world: World) -> None:
    first, second = world.keep(50), world.keep(40)
    async with world.store.use([first]):
        await world.take(50)
        assert [world.is_on_device(first), world.is_on_device(second)] == [True, False]
        with pytest.raises(ResourceExhaustedError):
            await world.take(1)
    await world.take(50)
    assert not world.is_on_device(first)


async def test_what_moved_can_come_back_and_move_again(world: World) -> None:
    handle = world.keep(60, value=3)
    reservation = await world.take(100)
    assert world.used == (60, 100)
    reservation.settle(0)
    room = world.memory.room_of_call()
    await world.evictor.grow(room.device, 60)
    async with world.store.use([handle]) as held:
        held.relocate(handle, world.array(60, 3), room)
        assert world.used == (0, 60)
        assert room.used == 0
    assert world.budget.used_for[Purpose.STORED] == 60
    await world.take(100)
    assert (world.used, world.value(handle)) == ((60, 100), 3)


async def test_another_copy_of_what_is_there_already_counts_for_nobody(world: World) -> None:
    """Two ops use a tensor at the same time, and each brings a copy."""
    stored = keep_now(world.store, [np.full(30, 5, np.uint8)], None, shared=False)
    rooms = [world.memory.room_of_call() for _ in range(2)]
    for room in rooms:
        await world.evictor.grow(room.device, 30)
    async with world.store.use(stored) as first, world.store.use(stored) as second:
        for held, room in zip((first, second), rooms, strict=True):
            held.relocate(stored[0], world.array(30, 5), room)
        assert world.used == (0, 60)
    for room in rooms:
        room.settle()
    assert world.used == (0, 30)


async def test_others_make_room_if_the_host_has_none_for_what_would_move_first() -> None:
    world = World(host_limit=50)
    handles = [world.keep(20, "worker"), world.keep(60, "chief"), world.keep(20, "fourth")]
    await world.take(20, "third")
    assert [world.is_on_device(each) for each in handles] == [False, True, True]


async def test_without_room_on_the_host_nothing_moves() -> None:
    world = World(host_limit=10)
    handle = world.keep(60)
    with pytest.raises(ResourceExhaustedError, match=f"50 asked for, 60 in use, {LIMIT} allowed"):
        await world.take(50)
    assert world.is_on_device(handle)
    assert world.used == (0, 60)


class TestMeanwhile:
    """What happens to a tensor while it is copied, and what it counts for then."""

    async def _meanwhile(self, world: World, happens: Callable[[str], Awaitable[object]]) -> str:
        """Begins to move a tensor, lets something happen, and goes on."""
        handle = world.keep(60, value=9)
        world.compute.gate.clear()
        taking = asyncio.create_task(world.take(100))
        await world.compute.is_copying.wait()
        assert world.used == (60, 60), "it counts on both sides"
        await happens(handle)
        world.compute.gate.set()
        await asyncio.gather(taking, return_exceptions=True)
        return handle

    async def test_it_is_used(self, world: World) -> None:
        async def use(handle: str) -> None:
            self.using = world.store.use([handle])
            held = await self.using.__aenter__()
            assert world.device.holds(held.arrays[handle])

        handle = await self._meanwhile(world, use)
        assert world.is_on_device(handle)
        assert world.used == (0, 60), "who needed room was refused"
        await self.using.__aexit__(None, None, None)
        await world.take(100)
        assert (world.used, world.value(handle)) == ((60, 100), 9)

    async def test_another_moves_if_it_is_used(self, world: World) -> None:
        used, other = world.keep(50), world.keep(50)
        world.compute.gate.clear()
        taking = asyncio.create_task(world.take(50))
        await world.compute.is_copying.wait()
        async with world.store.use([used]):
            world.compute.gate.set()
            await taking
            assert [world.is_on_device(each) for each in (used, other)] == [True, False]
        assert world.used == (50, 100)

    async def test_it_was_used(self, world: World) -> None:
        async def use(handle: str) -> None:
            async with world.store.use([handle]):
                await asyncio.sleep(0)

        handle = await self._meanwhile(world, use)
        assert (world.used, world.value(handle)) == ((60, 100), 9)

    async def test_somebody_wants_it_alone(self, world: World) -> None:
        """It is being read, so nobody may write to it."""

        async def release(handle: str) -> None:
            async with world.store.use([handle], release=True) as held:
                assert not held.exclusive

        await self._meanwhile(world, release)
        assert world.used == (0, 100)
        assert len(world.store) == world.handles.used == 0

    async def test_it_is_deleted(self, world: World) -> None:
        async def delete(handle: str) -> None:
            assert world.store.delete([handle]) == 1
            assert world.used == (60, 60), "until nobody reads it"

        await self._meanwhile(world, delete)
        assert world.used == (0, 100)
        assert len(world.store) == world.handles.used == 0

    async def test_its_lease_ends(self, world: World) -> None:
        async def expire(_: str) -> None:
            assert world.expire(LEASE) == 1

        await self._meanwhile(world, expire)
        assert world.used == (0, 100)
        assert len(world.store) == world.handles.used == 0

    async def test_moving_is_no_use(self, world: World) -> None:
        async def wait(_: str) -> None:
            world.now += LEASE / 2

        await self._meanwhile(world, wait)
        assert world.expire(LEASE / 2) == 1

    async def test_another_copy_takes_its_place(self, world: World) -> None:
        async def replace(handle: str) -> None:
            async with world.store.use([handle]) as held:
                held.relocate(handle, world.array(60, 4), Room(Reservation(Budget(0, "bytes"))))

        handle = await self._meanwhile(world, replace)
        assert (world.is_on_device(handle), world.value(handle)) == (False, 4), "the new one has moved"
        assert world.used == (60, 100)

    @pytest.mark.parametrize("error", [MemoryError(), RuntimeError("the bus is gone")])
    async def test_the_copy_fails(self, world: World, error: Exception) -> None:
        def fail() -> None:
            raise error

        world.compute.before = fail
        handle = world.keep(60)
        with pytest.raises(type(error)):
            await world.take(100)
        assert world.used == (0, 60)
        world.compute.before = lambda: None
        await world.take(100)
        assert world.used == (60, 100)
        assert not world.is_on_device(handle)

    async def test_the_caller_goes_away(self, world: World) -> None:
        handle = world.keep(60)
        world.compute.gate.clear()
        taking = asyncio.create_task(world.take(100))
        await world.compute.is_copying.wait()
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        assert world.used == (0, 60)
        world.compute.gate.set()
        async with world.store.use([handle], release=True) as held:
            assert held.exclusive
        assert world.used == (0, 0)

    async def test_others_who_need_room_wait_for_their_turn(self, world: World) -> None:
        handles = [world.keep(50) for _ in range(2)]
        world.compute.gate.clear()
        takers = [asyncio.create_task(world.take(50)) for _ in range(3)]
        await world.compute.is_copying.wait()
        world.compute.gate.set()
        results = await asyncio.gather(*takers, return_exceptions=True)
        assert [isinstance(each, ResourceExhaustedError) for each in results] == [False, False, True]
        assert world.used == (100, 100)
        assert not any(map(world.is_on_device, handles))


class TestAttempts:
    """Work for which the device has no memory, though the limit would allow it."""

    class Work:
        """Fails a number of times."""

        def __init__(self, num_failures: int) -> None:
            self.num_failures = num_failures
            self.num_begun = 0

        async def __call__(self) -> str:
            self.num_begun += 1
            if self.num_begun <= self.num_failures:
                raise DeviceFullError("CUDA says no")
            return "done"

    async def test_tensors_move_and_it_is_done_again(self, world: World) -> None:
        handles = [world.keep(10), world.keep(20), world.keep(10)]
        work = self.Work(1)
        assert await world.evictor.attempt(work, 25) == "done"
        assert [world.is_on_device(handle) for handle in handles] == [False, False, True]
        assert work.num_begun == 2

    async def test_more_and_more_of_them_move(self, world: World) -> None:
        """What has moved may have been in pieces, or others have taken its memory."""
        handles = [world.keep(10) for _ in range(10)]
        assert await world.evictor.attempt(self.Work(2), 15) == "done"
        assert [world.is_on_device(handle) for handle in handles] == [False] * 5 + [True] * 5

    @pytest.mark.parametrize(("num_stored", "num_begun"), [(0, 1), (1, 2), (20, 4)])
    async def test_it_ends_with_the_numbers(self, world: World, num_stored: int, num_begun: int) -> None:
        for _ in range(num_stored):
            world.keep(5)
        work = self.Work(10)
        with pytest.raises(ResourceExhaustedError, match=r"5 bytes asked for, \d+ in use, 100 allowed .*CUDA says no"):
            await world.evictor.attempt(work, 5)
        assert work.num_begun == num_begun
