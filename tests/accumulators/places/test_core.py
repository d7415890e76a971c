"""Accumulators on a device: no socket, and kernels that run on the CPU."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.gradient import Average, Contribution, Gradient, Summand
from gradserve_server.accumulators.places.place import Places
from gradserve_server.accumulators.spec import ComponentSpec
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.inventory import NoSuchDeviceError
from gradserve_server.errors import ResourceExhaustedError, UnavailableError
from tests.accumulators.bench import F32, Bench, apply, opened, take, turns
from tests.accumulators.places.on_device import OnDevice
from tests.journals import ListedJournal


class HeldInThreads(InlineCompute):
    """Work on the device that waits to be let go on, once `begun` is cleared."""

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    async def run(self, num_bytes: int, function: Any, *args: Any, **kwargs: Any) -> Any:
        return await self.run_in_thread(function, *args, **kwargs)

    async def run_in_thread(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.begun.set()
        await self.go_on.wait()
        return function(*args, **kwargs)

    def hold(self) -> None:
        self.begun.clear()
        self.go_on.clear()


@pytest.fixture
def there(compiled: Path) -> OnDevice:
    return OnDevice(compiled)


async def given(acc: Accumulator, value: Any, *, owned: bool = False, live: bool = False, **how: Any) -> None:
    await acc.apply(None, Contribution(**how), opened(Gradient({"": value}, owned=owned, live=live)))


async def read(average: Average) -> list[float]:
    values: Any = (await average.on_host()).values
    found: list[float] = values[""].tolist()
    return found


async def test_an_average_is_copied_once_for_all_readers(there: OnDevice) -> None:
    bench = Bench(places=there.places)
    acc = bench.accumulator()
    await apply(acc, 1, 2, 3)
    average, _ = await take(acc, 1)
    assert there.device.holds(average.values[""])
    assert (there.sums, bench.memory.used, there.device.copied_out) == (12, 0, 0)
    first = await asyncio.gather(*(read(average) for _ in range(5)))
    assert first == [[1, 2, 3]] * 5
    assert (there.sums, bench.memory.used, there.device.copied_out) == (12, 12, 12)
    values: Any = (await average.on_host()).values
    assert not values[""].flags.writeable
    await apply(acc, 4, 5, 6, local_step=1)
    await take(acc, 1)
    assert (there.sums, bench.memory.used) == (12, 0), "the copy went with its average"
    assert await read(average) == [1, 2, 3], "for who still has it"
    assert bench.memory.used == 0


async def test_a_reader_that_goes_away_takes_nothing_from_others(compiled: Path) -> None:
    compute = HeldInThreads()
    there = OnDevice(compiled, compute=compute)
    bench = Bench(places=there.places)
    acc = bench.accumulator()
    await apply(acc, 1)
    average, _ = await take(acc, 1)
    compute.hold()
    leaving, staying = (asyncio.create_task(read(average)) for _ in range(2))
    await compute.begun.wait()
    leaving.cancel()
    await turns()
    acc.close(UnavailableError("the end"))
    compute.go_on.set()
    assert await staying == [1]
    assert leaving.cancelled()
    assert (there.sums, bench.memory.used, there.device.copied_out) == (0, 0, 4)


async def test_a_copy_for_which_there_is_no_memory_is_tried_again(there: OnDevice) -> None:
    bench = Bench(places=there.places, limit=4)
    acc = bench.accumulator(ComponentSpec("", F32))
    await apply(acc, 1, 2)
    average, _ = await take(acc, 1)
    with pytest.raises(ResourceExhaustedError):
        await read(average)
    bench.memory.limit = 8
    assert await read(average) == [1, 2]
    assert bench.memory.used == 8


async def test_a_call_that_is_cancelled_is_finished_or_leaves_nothing(compiled: Path) -> None:
    compute = HeldInThreads()
    there = OnDevice(compiled, compute=compute)
    acc = Bench(places=there.places).accumulator()
    await apply(acc, 1)
    compute.hold()
    applying = asyncio.create_task(apply(acc, 3))
    await compute.begun.wait()
    applying.cancel()
    await turns()
    compute.go_on.set()
    average, _ = await take(acc, 2)
    assert await read(average) == [2]
    acc.close(UnavailableError("the end"))
    assert there.budget.used == 0


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_full_device_changes_nothing(there: OnDevice, *, deterministic: bool) -> None:
    acc = Bench(places=there.places).accumulator(ComponentSpec("", np.dtype(np.float16)), deterministic=deterministic)
    halves = np.array([1, 2], np.float16)
    await given(acc, halves, worker_id="a")
    before = (acc.state, there.sums)
    there.device.num_failures = 2  # the second time, the device has given back what it kept
    with pytest.raises(ResourceExhaustedError, match="the memory of the device does not suffice"):
        await given(acc, halves, worker_id="b")
    assert (acc.state, there.sums) == before
    there.device.num_failures = 1
    await given(acc, halves, worker_id="b")
    there.device.num_failures = 2
    with pytest.raises(ResourceExhaustedError):
        await take(acc, 2)
    average, _ = await take(acc, 2)
    assert await read(average) == [1, 2]


async def test_stored_tensors_make_room_for_sums(compiled: Path) -> None:
    there = OnDevice(compiled, limit=20)
    acc = Bench(places=there.places).accumulator()
    there.keep(7, 8, 9)
    await apply(acc, 1, 2, 3)
    assert (there.sums, there.budget.used, there.host.used) == (12, 12, 12)
    with pytest.raises(ResourceExhaustedError, match="bytes of the device: 12 asked for, 12 in use, 20 allowed"):
        await apply(acc, 4, 5, 6)
    assert there.sums == 12


async def test_stored_tensors_make_room_for_handles_of_an_average(compiled: Path) -> None:
    there = OnDevice(compiled, limit=20)
    acc = Bench(places=there.places).accumulator()
    await apply(acc, 1, 2)
    average, _ = await take(acc, 1)
    there.keep(7, 8)
    room = there.memory.room_of_call()
    assert average.host_copy is not None
    await average.host_copy.reserve(room.device, room.owner)
    assert (room.device.used, there.sums, there.budget.used, there.host.used) == (8, 8, 16, 8)
    room.settle()


async def test_the_memory_of_a_gradient_on_the_device_becomes_the_sum(there: OnDevice) -> None:
    acc = Bench(places=there.places).accumulator()
    mine = there.array(1, 2)
    await given(acc, mine, owned=True)
    others = there.array(3, 4)
    await given(acc, others)
    average, _ = await take(acc, 2)
    assert average.values[""] is mine
    assert (await read(average), others.hidden.tolist()) == ([2, 3], [3, 4])
    assert there.device.copied_out == 8, "the average alone"


@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("deterministic", [False, True])
async def test_what_a_client_changes_later_does_not_count(
    there: OnDevice, where: str, *, deterministic: bool, is_checked: bool
) -> None:
    acc = Bench(places=there.places).accumulator(deterministic=deterministic, refuse_non_finite=is_checked)
    shared: Any = there.array(1, 2) if where == "device" else np.array([1, 2], np.float32)
    await given(acc, shared, live=True, worker_id="a")
    assert there.sums == 8
    (shared.hidden if where == "device" else shared)[...] = np.nan
    average, _ = await take(acc, 1)
    assert await read(average) == [1, 2]


async def test_a_deterministic_round_is_one_launch_for_sixteen(there: OnDevice) -> None:
    acc = Bench(places=there.places).accumulator(deterministic=True)
    for number in range(17):
        await given(acc, np.array([number], np.float32), worker_id=f"{number:02}")
    there.device.emulated.launched.clear()
    average, _ = await take(acc, 17)
    assert there.device.emulated.launched == ["combine_float32_in_float32_to_float32"] * 2
    assert await read(average) == [8]


async def test_a_round_that_is_not_to_be_leaves_its_sum(there: OnDevice) -> None:
    journal: ListedJournal[Any] = ListedJournal()
    acc = Bench(places=there.places, journal=journal).accumulator()
    await apply(acc, 3)
    before = acc.state
    journal.failure = UnavailableError("no disk")
    with pytest.raises(UnavailableError):
        await take(acc, 1)
    journal.failure = None
    assert acc.state == before
    assert await read((await take(acc, 1))[0]) == [3]


def test_a_default_that_the_server_does_not_have() -> None:
    host = Bench().places.host
    with pytest.raises(NoSuchDeviceError, match="expected a device of this server, cpu, got 'cuda:0'"):
        Places(host, default="cuda:0")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
async def test_sums_of_gradients(there: OnDevice, dtype: Any, deterministic: bool) -> None:
    """They are in the dtype of the sums, and are rounded to that of the component once."""
    acc = Bench(places=there.places).accumulator(ComponentSpec("", np.dtype(dtype)), deterministic=deterministic)
    both = (Summand(1.0, "a"), Summand(2.0, "b"))
    whole = np.array([1 + 2**-12, 3.0, -1e-3], np.float32)
    one = np.array([1.0, 0.5, 2.0], dtype)
    await given(acc, one, worker_id="c", weight=0.5)
    await given(acc, whole, worker_id="host", weight=3.0, sum_of=both)
    average, _ = await take(acc, 3)
    expected = (np.float32(0.5) * one.astype(np.float32) + whole) / np.float32(3.5)
    assert await read(average) == expected.astype(dtype).tolist()
    assert (average.num_gradients, average.total_weight) == (3, 3.5)
