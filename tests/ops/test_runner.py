"""Running ops: preparation, memory, callers that go away."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.compute import ThreadCompute
from gradserve_server.devices.device import CpuDevice
from gradserve_server.devices.host.loading import KernelLoader
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.ops.operation import Op
from gradserve_server.ops.runner import CheckedCall, OpRunner, check_call
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.memory import Memory
from gradserve_server.tensors.spec import TensorSpec
from tests.servers.polling import PATIENCE_SECONDS, eventually

LIMIT = 10_000_000


@dataclass(frozen=True)
class Inputs:
    x: np.ndarray
    unused: np.ndarray | None = None


@dataclass(frozen=True)
class Outputs:
    y: np.ndarray


@dataclass(frozen=True)
class Attributes:
    factor: int = 2


@dataclass(frozen=True)
class Plan:
    output_specs: tuple[TensorSpec, ...]


@dataclass
class Doubling:
    """A family whose computation and preparation end when a test says so."""

    may_compute: threading.Event = field(default_factory=threading.Event)
    may_prepare: threading.Event = field(default_factory=threading.Event)
    preparing: threading.Event = field(default_factory=threading.Event)
    computing: threading.Event = field(default_factory=threading.Event)
    threads: list[int] = field(default_factory=list)
    num_prepared: int = 0
    stopped: bool = False

    def prepare(self, stop: Callable[[], bool]) -> None:
        self.preparing.set()
        while not self.may_prepare.wait(0.01):
            if stop():
                self.stopped = True
                return
        self.num_prepared += 1

    def double(self, inputs: Inputs, attributes: Attributes, plan: Plan) -> Outputs:
        self.threads.append(threading.get_ident())
        self.computing.set()
        assert self.may_compute.wait(PATIENCE_SECONDS)
        return Outputs(inputs.x * attributes.factor)


def plan(inputs: Inputs, attributes: Attributes) -> Plan:
    return Plan((TensorSpec(inputs.x.dtype, inputs.x.shape),))


DOUBLE: Op[Inputs, Attributes, Outputs, Plan] = Op(
    "Double", "doubling", Inputs, Attributes, Outputs, plan, lambda family, *call: family.double(*call)
)


def call_of(num_floats: int) -> CheckedCall[Inputs, Attributes, Outputs, Plan]:
    return check_call(DOUBLE, Inputs(np.ones(num_floats)), Attributes())


BIG = 100_000


@dataclass
class World:
    family: Doubling
    memory: Budget
    runner: OpRunner
    loader: KernelLoader


@pytest.fixture
async def world() -> AsyncIterator[World]:
    family, memory, compute = Doubling(), Budget(LIMIT, "bytes of tensor memory"), ThreadCompute(2)
    device = CpuDevice(BufferPool(0))
    loader, families = KernelLoader(), {"doubling": family}
    runner = OpRunner(device=device, families=families, compute=compute, memory=Memory(memory), loader=loader)
    yield World(family, memory, runner, loader)
    family.may_compute.set()
    runner.close()
    runner.join()
    compute.close()


async def test_small_work_is_done_at_once(world: World) -> None:
    world.family.may_compute.set()
    assert (await world.runner.run(call_of(3), on_host=True)).outputs.y.tolist() == [2, 2, 2]
    await world.runner.run(call_of(BIG), on_host=True)
    small, big = world.family.threads
    assert small == threading.get_ident() != big


async def test_small_work_in_many_steps_is_not(world: World) -> None:
    world.family.may_compute.set()
    small = call_of(3)
    await world.runner.run(replace(small, op=replace(DOUBLE, is_quick=False)), on_host=True)
    assert world.family.threads != [threading.get_ident()]


async def test_outputs_are_reserved_while_they_are_computed(world: World) -> None:
    running = asyncio.create_task(world.runner.run(call_of(BIG), on_host=True))
    await asyncio.to_thread(world.family.computing.wait, 30)
    assert world.memory.used == BIG * 8
    world.family.may_compute.set()
    await running
    assert world.memory.used == 0


async def test_outputs_that_do_not_fit_are_not_computed(world: World) -> None:
    with pytest.raises(ResourceExhaustedError, match="too many bytes of tensor memory: 16000000 asked for"):
        await world.runner.run(call_of(2_000_000), on_host=True)
    assert world.family.threads == []
    assert world.memory.used == 0


async def test_what_the_computation_takes_is_reserved_as_long(world: World) -> None:
    call = call_of(BIG)
    running = asyncio.create_task(
        world.runner.run(replace(call, op=replace(DOUBLE, scratch_bytes=lambda *_: 1000)), on_host=True)
    )
    await asyncio.to_thread(world.family.computing.wait, 30)
    assert world.memory.used == BIG * 8 + 1000
    world.family.may_compute.set()
    await running
    assert world.memory.used == 0
    too_much = replace(call, op=replace(DOUBLE, scratch_bytes=lambda *_: LIMIT - BIG * 8 + 1))
    with pytest.raises(ResourceExhaustedError, match="too many bytes of tensor memory: 10000001 asked for"):
        await world.runner.run(too_much, on_host=True)
    assert world.memory.used == 0


async def test_a_caller_that_goes_away_holds_memory_until_the_work_has_ended(world: World) -> None:
    running = asyncio.create_task(world.runner.run(call_of(BIG), on_host=True))
    await asyncio.to_thread(world.family.computing.wait, 30)
    running.cancel()
    await asyncio.sleep(0)
    assert world.memory.used == BIG * 8
    world.family.may_compute.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert world.memory.used == 0


async def test_an_error_gives_memory_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*call: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(world.family, "double", out_of_memory)
    for size in (3, BIG):
        with pytest.raises(MemoryError):
            await world.runner.run(call_of(size), on_host=True)
        assert world.memory.used == 0


async def test_a_call_has_what_it_asks_for_loaded_and_does_not_wait_for_it(world: World) -> None:
    def is_prepared() -> bool:
        return world.runner.is_prepared

    world.family.may_compute.set()
    world.loader.want("doubling", world.family.prepare)
    assert (world.runner.is_preparing, world.runner.is_prepared) == (False, False)
    await world.runner.run(call_of(3), on_host=True)
    await world.runner.run(call_of(3), on_host=True)
    assert (world.runner.is_preparing, world.runner.is_prepared) == (True, False)
    world.family.may_prepare.set()
    await asyncio.to_thread(eventually, is_prepared)
    assert world.family.num_prepared == 1


async def test_what_no_call_asks_for_is_loaded_only_with_everything(world: World) -> None:
    world.family.may_compute.set()
    world.family.may_prepare.set()
    await world.runner.run(call_of(3), on_host=True)
    assert world.runner.is_prepared
    assert world.family.num_prepared == 0
    for _ in range(2):
        world.runner.prepare()
    await asyncio.to_thread(world.runner.join)
    assert world.family.num_prepared == 1


async def test_closing_breaks_the_preparation_off(world: World) -> None:
    world.runner.prepare()
    await asyncio.to_thread(world.family.preparing.wait, PATIENCE_SECONDS)
    world.runner.close()
    await asyncio.to_thread(world.runner.join)
    assert world.family.stopped
    assert world.family.num_prepared == 0
