"""The addition that ends a round is computed together with the division."""

import asyncio
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradserve_server.accumulators.gradient import Contribution, Gradient
from gradserve_server.accumulators.spec import ComponentSpec, Reduction
from gradserve_server.accumulators.sums.round_sum import AverageMemory
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.reduction import Reducer
from gradserve_server.errors import UnavailableError
from tests.accumulators.bench import Bench, apply, opened, push_pull, take, turns, value_of
from tests.accumulators.test_average_memory import ListedMemory
from tests.journals import ListedJournal


class ListedReducer(Reducer):
    """Notes what it computes."""

    def __init__(self) -> None:
        super().__init__(ForkJoin(1))
        self.calls: list[str] = []

    def scale(self, *arguments: Any) -> None:
        self.calls.append("scale")
        super().scale(*arguments)

    def add_scaled(self, *arguments: Any) -> None:
        self.calls.append("add")
        super().add_scaled(*arguments)

    def divide(self, *arguments: Any) -> None:
        self.calls.append("divide")
        super().divide(*arguments)

    def add_and_divide(self, *arguments: Any) -> None:
        self.calls.append("add and divide")
        super().add_and_divide(*arguments)


@pytest.fixture
def reducer() -> ListedReducer:
    return ListedReducer()


@pytest.mark.parametrize("memory", [None, ListedMemory()], ids=["in place", "elsewhere"])
@pytest.mark.parametrize("reduction", list(Reduction))
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
async def test_the_result_does_not_depend_on_whether_somebody_waits(
    dtype: Any, reduction: Reduction, memory: AverageMemory | None
) -> None:
    values = np.random.default_rng(0).standard_normal((3, 100)).astype(dtype)
    results = []
    for waits in (False, True):
        bench = Bench(average_memory=memory)
        acc = bench.accumulator(ComponentSpec("", np.dtype(dtype)), reduction=reduction)
        taking = asyncio.create_task(take(acc, 3)) if waits else None
        await turns()
        for weight, value in enumerate(values, 1):
            gradient = Gradient({"": value})
            await acc.apply(None, Contribution(weight=weight / 3), opened(gradient))
        average, _ = await (taking or take(acc, 3))
        results.append(average.values[""].tobytes())
        assert bench.memory.used == acc.state.num_bytes == 100 * np.dtype(dtype).itemsize
    assert results[0] == results[1]


async def test_one_pass_if_somebody_waits(reducer: ListedReducer) -> None:
    acc = Bench(reducer=reducer).accumulator()
    taking = asyncio.create_task(take(acc, 3))
    await turns()
    for _ in range(3):
        await apply(acc, 1)
    assert value_of((await taking)[0]) == [1]
    assert reducer.calls == ["scale", "add", "add and divide"]


async def test_one_pass_for_push_pull(reducer: ListedReducer) -> None:
    acc = Bench(reducer=reducer).accumulator()
    calls = [push_pull(acc, value, num_required=2, worker_id=str(value)) for value in (1, 3)]
    answers = await asyncio.gather(*calls)
    assert [value_of(average) for _, average, _ in answers] == [[2], [2]]
    assert reducer.calls == ["scale", "add and divide"]


async def test_two_passes_if_nobody_waits(reducer: ListedReducer) -> None:
    acc = Bench(reducer=reducer).accumulator()
    for value in (1, 3):
        await apply(acc, value)
    assert reducer.calls == ["scale", "add"]
    assert value_of((await take(acc, 2))[0]) == [2]
    assert reducer.calls == ["scale", "add", "divide"]


async def test_the_only_gradient_of_a_round(reducer: ListedReducer) -> None:
    acc = Bench(reducer=reducer).accumulator()
    takers = [asyncio.create_task(take(acc, 1)) for _ in range(2)]
    await turns()
    await apply(acc, 6, weight=2)
    await apply(acc, 5, local_step=1)
    assert [value_of((await each)[0]) for each in takers] == [[6], [5]]
    assert reducer.calls == ["scale", "divide"] * 2


async def test_a_round_that_cannot_end_has_the_gradient_all_the_same(reducer: ListedReducer) -> None:
    class RefusesSecondEvents(ListedJournal[Any]):
        async def append(self, event: Any) -> None:
            if len(self.events) == 2:
                raise UnavailableError("no disk")
            await super().append(event)

    journal = RefusesSecondEvents()
    bench = Bench(reducer=reducer, journal=journal)
    acc = bench.accumulator()
    taking = asyncio.create_task(take(acc, 2))
    await turns()
    await apply(acc, 1)
    await apply(acc, 3)
    with pytest.raises(UnavailableError):
        await taking
    assert (acc.num_accumulated, bench.memory.used) == (2, 4)
    assert reducer.calls == ["scale", "add"]
    journal.events.append(None)
    assert value_of((await take(acc, 2))[0]) == [2]


async def test_workers_in_order(reducer: ListedReducer) -> None:
    acc = Bench(reducer=reducer).accumulator(deterministic=True)
    for value in (1, 2, 6):
        await apply(acc, value, worker_id=str(value))
    assert reducer.calls == []
    assert value_of((await take(acc, 3))[0]) == [3]
    assert reducer.calls == ["scale", "add", "add and divide"]
