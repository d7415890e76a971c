"""Many callers at once: no tensor is lost or changed, and every byte counts once."""

import asyncio
import random
from contextlib import suppress

import numpy as np
import pytest

from gradserve_server.errors import NotFoundError, ResourceExhaustedError
from gradserve_server.resources.budget import Purpose
from gradserve_server.security.identity import owner_named
from tests.servers.separate_device import SeparateArray
from tests.tensors.device_memory.world import LIMIT, RESERVED, World
from tests.tensors.keeping import keep_now

NAMES = ("chief", "worker", "limited")
NUM_CALLERS = 8
NUM_STEPS = 60


class Caller:
    """Stores, uses, moves and deletes tensors as calls do, and is cancelled now and then."""

    def __init__(self, world: World, seed: int, values: dict[str, int]) -> None:
        self._world = world
        self._random = random.Random(seed)
        self._values = values
        self._name = NAMES[seed % len(NAMES)]

    async def run(self) -> None:
        for _ in range(NUM_STEPS):
            step = asyncio.create_task(
                self._random.choice([self._store, self._store, self._use, self._use, self._end])()
            )
            for _ in range(self._random.randrange(6)):
                await asyncio.sleep(0)
            if self._random.random() < 0.15:
                step.cancel()
            await asyncio.wait([step])
            with suppress(asyncio.CancelledError, ResourceExhaustedError, NotFoundError):
                step.result()
            assert self._world.budget.used <= LIMIT

    async def _pause(self) -> None:
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)

    async def _store(self) -> None:
        """Keeps an output of an op."""
        world, size, value = self._world, self._random.randrange(1, 25), self._random.randrange(256)
        owner = owner_named(self._name)
        room = world.memory.room_of_call(owner)
        try:
            await world.evictor.grow(room.device, size, owner)
            await self._pause()
            (handle,) = keep_now(world.store, [world.array(size, value)], None, shared=False, room=room, owner=owner)
            self._values[handle] = value
        finally:
            room.settle()

    async def _use(self) -> None:
        """Runs an op on a tensor, which moves to the device."""
        world, owner = self._world, owner_named(self._name)
        if not (handles := [each for each in self._values if world.store._entries[each].owner == self._name]):
            return
        handle = self._random.choice(handles)
        room = world.memory.room_of_call(owner)
        try:
            async with world.store.use([handle], user=owner) as held:
                await self._pause()
                array = held.arrays[handle]
                if not isinstance(array, SeparateArray):
                    await world.evictor.grow(room.device, array.nbytes, owner)
                    await self._pause()
                    array = SeparateArray(array.copy())
                    held.relocate(handle, array, room)
                await self._pause()
                assert set(array.hidden.tolist()) == {self._values.get(handle, array.hidden[0])}
        finally:
            room.settle()

    async def _end(self) -> None:
        """Deletes a tensor, or releases it with its last use."""
        world, owner = self._world, owner_named(self._name)
        if not (handles := [each for each in self._values if world.store._entries[each].owner == self._name]):
            return
        handle = self._random.choice(handles)
        if self._random.random() < 0.5:
            assert world.store.delete([handle], user=owner) == 1
            del self._values[handle]
            return
        value = self._values.pop(handle)
        try:
            async with world.store.use([handle], release=True, user=owner):
                await self._pause()
        except BaseException:
            self._values[handle] = value
            raise


@pytest.mark.parametrize("seed", range(6))
async def test_every_byte_counts_once(seed: int) -> None:
    world, values = World(host_limit=400), dict[str, int]()
    chance = random.Random(seed)

    async def open_and_close() -> None:
        while True:
            await asyncio.sleep(0)
            (world.compute.gate.set if chance.random() < 0.3 else world.compute.gate.clear)()

    gate = asyncio.create_task(open_and_close())
    await asyncio.gather(*(Caller(world, 100 * seed + each, values).run() for each in range(NUM_CALLERS)))
    gate.cancel()
    assert world.evictor.num_evicted > 10
    entries = {handle: world.store._entries[handle] for handle in values}
    assert len(world.store) == len(values) == world.handles.used
    assert {handle: world.value(handle) for handle in values} == values
    for budget, where in ((world.budget, SeparateArray), (world.host, np.ndarray)):
        there = [each for each in entries.values() if isinstance(each.array, where)]
        assert budget.used == sum(each.array.nbytes for each in there)
        for name in NAMES:
            held = sum(each.array.nbytes for each in there if each.owner == name)
            assert budget.held_by(name) == held
    assert world.budget.used_for[Purpose.STORED] == world.budget.used
    assert world.budget.used_for[Purpose.COMPUTING] == 0
    assert sum(map(world.store.idle.num_bytes, NAMES)) == world.budget.used
    for name in NAMES:
        world.store.delete([each for each in values if entries[each].owner == name], user=owner_named(name))
    assert world.used == (0, 0)


@pytest.mark.parametrize("seed", range(3))
async def test_nobody_is_starved(seed: int) -> None:
    """However one identity fills the device, another gets what is reserved for it, every time."""
    world, chance = World(), random.Random(seed)
    for _ in range(200):
        with suppress(ResourceExhaustedError):
            world.keep((await _taken(world, chance.randrange(1, 60), "chief")), "chief")
        account = await world.take(RESERVED, "worker")
        account.settle(0)


async def _taken(world: World, num_bytes: int, owner: str) -> int:
    """Takes memory for a result and gives it back at once, as storing takes it again; returns how much."""
    (await world.take(num_bytes, owner)).settle(0)
    return num_bytes
