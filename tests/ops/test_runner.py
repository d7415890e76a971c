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
    computing: threading.Event = field(default_factory=threading.Event)
    threads: list[int] = field(default_factory=list)
    num_prepared: int = 0
    stopped: bool = False

    def prepare(self, stop: Callable[[], bool]) -> None:
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


@pytest.fixture
async def world() -> AsyncIterator[World]:
    family, memory, compute = Doubling(), Budget(LIMIT, "bytes of tensor memory"), ThreadCompute(2)
    device = CpuDevice(BufferPool(0))
    runner = OpRunner(device=device, families={"doubling": family}, compute=compute, memory=Memory(memory))
    yield World(family, memory, runner)
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


async def test_the_first_call_starts_the_preparation_and_does_not_wait_for_it(world: World) -> None:
    def is_prepared() -> bool:
        return world.runner.is_prepared

    world.family.may_compute.set()
    assert not world.runner.is_prepared
    await world.runner.run(call_of(3), on_host=True)
    await world.runner.run(call_of(3), on_host=True)
    assert not world.runner.is_prepared
    world.family.may_prepare.set()
    await asyncio.to_thread(eventually, is_prepared)
    assert world.family.num_prepared == 1


async def test_closing_breaks_the_preparation_off(world: World) -> None:
    world.runner.prepare()
    world.runner.close()
    await asyncio.to_thread(world.runner.join)
    assert world.family.stopped
    assert world.family.num_prepared == 0


async def test_a_preparation_that_fails_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def fail(stop: Any) -> None:
        raise OSError("no compiler")

    world.family.prepare = fail  # type: ignore[method-assign]
    world.family.may_compute.set()
    await world.runner.run(call_of(3), on_host=True)
    await asyncio.to_thread(world.runner.join)
    assert "preparing the kernels of doubling failed" in caplog.text
    assert "no compiler" in caplog.text
    await world.runner.run(call_of(3), on_host=True)


async def test_the_log_says_how_far_a_long_preparation_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gradserve_server.ops.runner._SILENT_SECONDS", 0.0)
    families = {"slow": Doubling(), "next": Doubling()}
    compute = ThreadCompute(1)
    runner = OpRunner(
        device=CpuDevice(BufferPool(0)), families=families, compute=compute, memory=Memory(Budget(LIMIT, "bytes"))
    )
    assert (runner.is_preparing, runner.is_prepared) == (False, False)
    with caplog.at_level("INFO", "gradserve_server.ops.runner"):
        runner.prepare()
        assert (runner.is_preparing, runner.is_prepared) == (True, False)
        for each in families.values():
            each.may_prepare.set()
        await asyncio.to_thread(runner.join)
    assert (runner.is_preparing, runner.is_prepared) == (False, True)
    said = [each.getMessage() for each in caplog.records]
    assert any(each.startswith("preparing kernels: 1 of 2 groups are done") and ", next next" in each for each in said)
    compute.close()
