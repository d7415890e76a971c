"""Averages that are written where others read them in place."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.gradient import Array, Contribution, Gradient, SparseSlices, Value
from gradserve_server.accumulators.spec import ComponentSpec, Layout, PartialShape, Reduction
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.errors import ResourceExhaustedError, UnavailableError
from tests.accumulators.bench import F32, Bench, apply, opened, take, value_of
from tests.journals import ListedJournal


class ListedMemory:
    """Notes what it gave."""

    def __init__(self, error: Exception | None = None, *, takes_sums: bool = False) -> None:
        self.takes_sums = takes_sums
        self.given: list[list[Array]] = []
        self.error = error

    def arrays(self, specs: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[Array] | None:
        if self.error is not None:
            raise self.error
        self.given.append([np.full(shape, 77, dtype) for shape, dtype in specs])
        return self.given[-1]


class CountingCompute(InlineCompute):
    """Notes the memory in use whenever there is something to compute."""

    def __init__(self) -> None:
        self.bench: Bench | None = None
        self.used: list[int] = []

    async def run(self, num_bytes: int, function: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.bench is not None
        self.used.append(self.bench.memory.used)
        return await super().run(num_bytes, function, *args, **kwargs)


@pytest.fixture
def memory() -> ListedMemory:
    return ListedMemory()


async def owned(acc: Accumulator, array: Array) -> None:
    await acc.apply(None, Contribution(worker_id="w"), opened(Gradient({"": array}, owned=True)))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("reduction", "expected"), [(Reduction.MEAN, [2, 4]), (Reduction.SUM, [8, 16])])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
async def test_averages_are_written_there(
    memory: ListedMemory, dtype: Any, reduction: Reduction, expected: list[float], *, deterministic: bool
) -> None:
    acc = Bench(average_memory=memory).accumulator(
        ComponentSpec("", np.dtype(dtype)), reduction=reduction, deterministic=deterministic
    )
    for values, weight in (([1, 2], 2), ([3, 6], 2)):
        contribution = Contribution(weight=weight, worker_id="w")
        gradient = Gradient({"": np.array(values, dtype)}, owned=True)
        await acc.apply(None, contribution, opened(gradient))
    average, _ = await take(acc, 2)
    ((array,),) = memory.given
    assert average.values[""] is array
    assert array.dtype == dtype
    assert array.tolist() == expected
    assert not array.flags.writeable


async def test_dense_components_of_one_round_are_asked_for_together(memory: ListedMemory) -> None:
    acc = Bench(average_memory=memory).accumulator(
        ComponentSpec("w", F32, PartialShape((-1,))),
        ComponentSpec("e", F32, PartialShape((4, 1)), Layout.SPARSE),
        ComponentSpec("b", np.dtype(np.float16)),
    )
    rows = SparseSlices(np.array([1]), np.ones((1, 1), np.float32))
    values: dict[str, Value] = {"w": np.ones(3, np.float32), "e": rows, "b": np.full((2, 2), 4, np.float16)}
    await acc.apply(None, Contribution(), opened(Gradient(values)))
    average, _ = await take(acc, 1)
    ((w, b),) = memory.given
    assert [(each.shape, each.dtype) for each in (w, b)] == [((3,), F32), ((2, 2), np.float16)]
    assert list(average.values) == ["w", "e", "b"]
    assert (average.values["w"] is w, average.values["b"] is b) == (True, True)
    assert (w.tolist(), b.tolist()) == ([1, 1, 1], [[4, 4], [4, 4]])


async def test_sparse_accumulators_ask_for_nothing(memory: ListedMemory) -> None:
    acc = Bench(average_memory=memory).accumulator(ComponentSpec("", F32, PartialShape((4, 1)), Layout.SPARSE))
    rows = SparseSlices(np.array([1]), np.ones((1, 1), np.float32))
    await acc.apply(None, Contribution(), opened(Gradient({"": rows})))
    await take(acc, 1)
    assert memory.given == []


@pytest.mark.parametrize("deterministic", [False, True])
async def test_sum_and_average_are_counted_once_each(memory: ListedMemory, *, deterministic: bool) -> None:
    compute = CountingCompute()
    bench = compute.bench = Bench(compute, average_memory=memory)
    acc = bench.accumulator(deterministic=deterministic)
    for step in range(3):
        await apply(acc, 1, 2, 3, worker_id="w", local_step=step)
        kept = 12 if step else 0
        assert bench.memory.used == acc.state.num_bytes == 12 + kept
        compute.used.clear()
        await take(acc, 1)
        assert set(compute.used) == {12 + 12 + kept}
        assert bench.memory.used == acc.state.num_bytes == 12


@pytest.mark.parametrize("error", [MemoryError(), ResourceExhaustedError("no more blocks")])
async def test_sums_are_divided_in_place_where_there_is_no_memory(error: Exception) -> None:
    bench = Bench(average_memory=ListedMemory(error))
    acc = bench.accumulator()
    mine = np.full(4, 6, np.float32)
    await owned(acc, mine)
    await apply(acc, 2, 2, 2, 2)
    average, _ = await take(acc, 2)
    assert average.values[""] is mine
    assert mine.tolist() == [4] * 4
    assert bench.memory.used == 16


async def test_sums_are_divided_in_place_when_the_budget_is_used_up(memory: ListedMemory) -> None:
    bench = Bench(average_memory=memory, limit=31)
    acc = bench.accumulator()
    mine = np.full(4, 6, np.float32)
    await owned(acc, mine)
    average, _ = await take(acc, 1)
    assert average.values[""] is mine
    assert len(memory.given) == 1
    assert bench.memory.used == 16


async def test_averages_that_are_not_to_be_leave_the_round_as_it_was(memory: ListedMemory) -> None:
    journal: ListedJournal[Any] = ListedJournal()
    bench = Bench(average_memory=memory, journal=journal)
    acc = bench.accumulator()
    await apply(acc, 3)
    before = acc.state
    journal.failure = UnavailableError("no disk")
    with pytest.raises(UnavailableError):
        await take(acc, 1)
    journal.failure = None
    assert acc.state == before
    assert bench.memory.used == 4
    assert value_of((await take(acc, 1))[0]) == [3]
    assert [each.tolist() for each in memory.given[0]] == [[77.0]]


async def test_sums_may_be_there_from_the_start() -> None:
    memory = ListedMemory(takes_sums=True)
    bench = Bench(average_memory=memory)
    acc = bench.accumulator()
    for number in (1, 2):
        first = np.full(4, 1, np.float32)
        contribution = Contribution(local_step=number)
        await acc.apply(None, contribution, opened(Gradient({"": first}, live=True)))
        first[...] = 77
        assert bench.memory.used == acc.state.num_bytes == 16 * number
        await apply(acc, 3, 3, 3, 3, local_step=number)
        average, _ = await take(acc, 2)
        assert bench.memory.used == acc.state.num_bytes == 16
        assert len(memory.given) == number, "one for the sum, which becomes the average"
        assert average.values[""] is memory.given[-1][0]
        assert average.values[""].tolist() == [2] * 4
        assert not average.values[""].flags.writeable


@pytest.mark.parametrize(
    ("spec", "owned"),
    [({}, True), ({"deterministic": True}, False), ({"accumulate_dtype": np.dtype(np.float64)}, False)],
    ids=["adopted", "in the order of workers", "of another dtype"],
)
async def test_other_sums_are_elsewhere(spec: dict[str, Any], *, owned: bool) -> None:
    memory = ListedMemory(takes_sums=True)
    acc = Bench(average_memory=memory).accumulator(**spec)
    gradient = Gradient({"": np.full(4, 6, np.float32)}, owned=owned)
    await acc.apply(None, Contribution(worker_id="w"), opened(gradient))
    assert memory.given == []
    average, _ = await take(acc, 1)
    assert average.values[""] is memory.given[0][0]
    assert average.values[""].tolist() == [6] * 4


async def test_without_that_memory_sums_are_ordinary() -> None:
    bench = Bench(average_memory=ListedMemory(MemoryError(), takes_sums=True))
    acc = bench.accumulator()
    await apply(acc, 4, 6)
    assert value_of((await take(acc, 1))[0]) == [4, 6]
    assert bench.memory.used == 8


@pytest.mark.parametrize(("dtype", "num_allocated"), [(np.float32, 0), (np.float16, 1)])
async def test_sums_in_the_order_of_workers_need_no_memory_of_their_own(
    memory: ListedMemory, dtype: Any, num_allocated: int
) -> None:
    allocated: list[tuple[int, ...]] = []

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        allocated.append(shape)
        return np.empty(shape, dtype)

    acc = Bench(average_memory=memory, allocate=allocate).accumulator(
        ComponentSpec("", np.dtype(dtype)), deterministic=True
    )
    for worker, value in (("b", 5), ("a", 1)):
        array = np.full(3, value, dtype)
        contribution = Contribution(worker_id=worker)
        await acc.apply(None, contribution, opened(Gradient({"": array})))
    average, _ = await take(acc, 2)
    assert average.values[""] is memory.given[0][0]
    assert average.values[""].tolist() == [3] * 3
    assert len(allocated) == num_allocated
