"""What survives of accumulators on a device, with the device and without it."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.gradient import Average, Contribution, Gradient
from gradserve_server.accumulators.places.device_place import DeviceJournal
from gradserve_server.accumulators.places.place import Places
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.errors import AbortedError, ResourceExhaustedError, ServiceError, UnavailableError
from gradserve_server.resources.budget import Budget
from gradserve_server.storage.journal import Durability
from tests.accumulators.bench import KEY, opened, take
from tests.accumulators.durable.disk import Disk
from tests.accumulators.places.on_device import OnDevice
from tests.accumulators.places.test_core import read

LEVELS = [Durability.ROUND, Durability.GRADIENT]
DTYPE = np.dtype(np.float32)


async def given(acc: Accumulator, value: Any, step: int, worker: str = "w", **kind: Any) -> None:
    contribution = Contribution(local_step=step, weight=0.3, worker_id=worker)
    await acc.apply(None, contribution, opened(Gradient({"": value}, **kind)))


def values(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(1000).astype(DTYPE)


async def after(disk: Disk, places: Any) -> Disk:
    """Another server on what is on disk if this one is killed now."""
    disk._limits["places"] = places
    return await disk.after_crash()


@pytest.mark.parametrize("durability", LEVELS)
@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_restart_goes_on_with_the_same_bits(
    compiled: Path, tmp_path: Path, durability: Durability, caplog: pytest.LogCaptureFixture, *, deterministic: bool
) -> None:
    """On the device; without the device, on the host; and later on the device again."""
    there = OnDevice(compiled)
    disk = await Disk.open(tmp_path / "state", places=there.places)
    acc = await disk.create(durability=durability, deterministic=deterministic, keep_averages=2)
    await given(acc, values(0), 0)
    await take(acc, 1)
    await given(acc, there.array(*values(1)), 1, "a", owned=True)
    await given(acc, values(2), 1, "b", live=True)
    expected = None
    opened_disks = [disk]
    for where, place in ((there.device.name, OnDevice(compiled).places), ("cpu", Places), (there.device.name, None)):
        found_disk = await after(opened_disks[-1], place or OnDevice(compiled).places)
        opened_disks.append(found_disk)
        found = found_disk.found()
        assert (found.place.name, found.spec.device) == (where, there.device.name)
        assert found.state.global_step == 1
        assert found.num_accumulated == (2 if durability is Durability.GRADIENT else 0)
        assert found_disk.bench.registry.create(KEY, found.spec)[0] is found, "it has the same name and spec"
    if durability is Durability.GRADIENT:
        for each in (acc, found):
            average = await read((await take(each, 2))[0])
            assert average == (expected or average)
            expected = average
    assert np.isclose(await read(await found.read_average(1, 1)), values(0)).all()
    (warning,) = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert warning == "accumulator 'test/acc' was on strict:0, which this server does not have: it is on the host now"
    for one in opened_disks:
        one.bench.registry.delete(KEY)
        await one.store.flush()
        assert one.bench.memory.used == 0
        one.store.close()
    assert there.budget.used == 0


@pytest.mark.parametrize("durability", LEVELS)
async def test_only_what_must_be_on_disk_is_copied(compiled: Path, tmp_path: Path, durability: Durability) -> None:
    there = OnDevice(compiled)
    disk = await Disk.open(tmp_path / "state", places=there.places)
    acc = await disk.create(durability=durability)
    await given(acc, values(0), 0)
    assert there.device.copied_out == (4000 if durability is Durability.GRADIENT else 0)
    before = there.device.copied_out
    average, _ = await take(acc, 1)
    await read(average)
    assert there.device.copied_out - before == 4000, "readers get the copy that was made for the disk"
    assert disk.bench.memory.used == 4000
    acc.close(AbortedError("the end"))
    assert disk.bench.memory.used == 0
    disk.store.close()


class FailingJournal:
    """Fails where it is told to."""

    def __init__(self) -> None:
        self.failing = ""
        self.written: asyncio.Future[None] | None = None

    async def append(self, event: Any) -> None:
        self._check("append")

    async def accept(self, event: Any, gradient: Gradient) -> asyncio.Future[None] | None:
        self._check("accept")
        assert isinstance(gradient.values[""], np.ndarray)
        return self.written

    async def reserve(self, num_bytes: int) -> None:
        self._check("reserve")

    async def settle(self, average: Average, answered: Sequence[Any], seen: object = None) -> None:
        self._check("settle")
        assert isinstance(average.values[""], np.ndarray)

    def _check(self, step: str) -> None:
        if step == self.failing:
            raise UnavailableError(f"no {step}")


class HostCopy:
    """The copy of an average."""

    def __init__(self, memory: Budget) -> None:
        self._copy = memory.reserve()

    async def reserve(self, reservation: Any, owner: Any) -> None:
        """Takes nothing."""

    async def values(self) -> Any:
        self._copy.grow(8)
        return {"": np.ones(2, DTYPE)}

    def close(self) -> None:
        self._copy.settle(0)


@pytest.fixture
def memory() -> Budget:
    return Budget(16, "bytes")


@pytest.fixture
def inner() -> FailingJournal:
    return FailingJournal()


@pytest.fixture
def journal(inner: FailingJournal, memory: Budget) -> DeviceJournal:
    def on_host(gradient: Gradient) -> Gradient:
        return Gradient({"": np.ones(2, DTYPE)})

    return DeviceJournal(inner, Durability.GRADIENT, InlineCompute(), on_host, memory.reserve())


GRADIENT = Gradient({"": np.ones(2, DTYPE)})
EVENT: Any = object()


def average_of(memory: Budget) -> Average:
    return Average({"": np.ones(2, DTYPE)}, 1, 0, 1, 1.0, (), HostCopy(memory))


@pytest.mark.parametrize("step", ["append", "accept", "reserve", "settle"])
async def test_a_failing_disk_leaves_no_memory_taken(
    journal: DeviceJournal, inner: FailingJournal, memory: Budget, step: str
) -> None:
    inner.failing = step
    with pytest.raises(ServiceError, match=f"no {step}"):
        await _all_steps(journal, memory)
    assert memory.used == 0


async def _all_steps(journal: DeviceJournal, memory: Budget) -> None:
    await journal.accept(EVENT, GRADIENT)
    await journal.reserve(16)
    await journal.append(EVENT)
    assert memory.used == 16, "what the average may need"
    await journal.settle(average_of(memory), ())


async def test_a_copy_counts_until_it_is_written(journal: DeviceJournal, inner: FailingJournal, memory: Budget) -> None:
    inner.written = asyncio.get_running_loop().create_future()
    await journal.accept(EVENT, GRADIENT)
    assert memory.used == 8
    await journal.accept(EVENT, GRADIENT)
    with pytest.raises(ResourceExhaustedError):
        await journal.accept(EVENT, GRADIENT)
    inner.written.set_result(None)
    await asyncio.sleep(0)
    assert memory.used == 0
