"""What accumulators hold, and how they are found."""

import itertools
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np
import pytest

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.accumulators.gradient import Contribution, Gradient, OpenGradient
from gradserve_server.accumulators.spec import (
    AccumulatorSpec,
    ComponentSpec,
)
from gradserve_server.config import LeaseConfig
from gradserve_server.errors import (
    NotFoundError,
    ResourceExhaustedError,
)
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.memory import Memory
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.tensors.store import TensorStore
from tests.accumulators.bench import F32, ID, KEY, Bench, FailingCompute, apply, opened, take, turns, value_of
from tests.tensors.keeping import keep_now

T = TypeVar("T")


class TestMemory:
    async def test_owned_gradient_becomes_the_sum(self, bench: Bench) -> None:
        acc = bench.accumulator()
        mine = np.ones(4, np.float32)
        await acc.apply(None, Contribution(), opened(Gradient({"": mine}, owned=True)))
        average, _ = await take(acc, 1)
        assert average.values[""] is mine

    async def test_other_gradients_are_not_touched(self, bench: Bench) -> None:
        acc = bench.accumulator()
        mine = np.ones(4, np.float32)
        for _ in range(2):
            await acc.apply(None, Contribution(weight=2), opened(Gradient({"": mine})))
        await take(acc, 2)
        assert mine.tolist() == [1] * 4

    async def test_memory_is_counted(self, bench: Bench) -> None:
        acc = bench.accumulator(keep_averages=2)
        await apply(acc, 1, 2, 3)
        assert bench.memory.used == acc.state.num_bytes == 12
        for step in range(5):
            await take(acc, 1)
            await apply(acc, 1, 2, 3, local_step=step + 1)
        assert bench.memory.used == acc.state.num_bytes == 3 * 12

    @pytest.mark.parametrize("deterministic", [False, True])
    async def test_memory_that_is_taken_over_is_never_counted_twice(self, bench: Bench, deterministic: bool) -> None:
        store = TensorStore(
            pool=BufferPool(0),
            memory=Memory(bench.memory),
            handles=Budget(9, "handles"),
            leases=LeaseConfig(),
            clock=lambda: bench.now,
            new_handle=map(str, itertools.count()).__next__,
        )
        seen: list[int] = []

        def opening(handle: str) -> OpenGradient:
            async def opened(use: Callable[[Gradient], Awaitable[T]]) -> T:
                async with store.use([handle], release=True) as held:
                    result = await use(Gradient({"": held.arrays[handle]}, held.exclusive, held.memory))
                    seen.append(bench.memory.used)
                    return result

            return opened

        acc = bench.accumulator(deterministic=deterministic)
        for handle in keep_now(store, [np.ones(4, np.float32), np.ones(4, np.float32)], None, shared=False):
            await acc.apply(None, Contribution(worker_id=handle), opening(handle))
        assert seen == [32, 32]
        assert bench.memory.used == (32 if deterministic else 16)
        await take(acc, 2)
        assert bench.memory.used == 16

    async def test_refused_when_memory_is_short(self) -> None:
        bench = Bench(limit=16)
        acc = bench.accumulator()
        with pytest.raises(ResourceExhaustedError, match="20 asked for, 0 in use, 16 allowed"):
            await apply(acc, 1, 2, 3, 4, 5)
        assert (acc.num_accumulated, bench.memory.used) == (0, 0)
        await apply(acc, 1, 2, 3, 4)
        await apply(acc, 1, 2, 3, 4)

    @pytest.mark.parametrize("deterministic", [False, True])
    async def test_out_of_memory_leaves_the_round_as_it_was(self, deterministic: bool) -> None:
        compute = FailingCompute()
        bench = Bench(compute)
        acc = bench.accumulator(deterministic=deterministic)
        await apply(acc, 3, worker_id="w")
        before = acc.state
        compute.failing = True
        with pytest.raises(ResourceExhaustedError):
            await apply(acc, 3, worker_id="w")
        with pytest.raises(ResourceExhaustedError):
            await take(acc, 1, ID)
        compute.failing = False
        assert acc.state == before
        average, duplicate = await take(acc, 1, ID)
        assert value_of(average) == [3]
        assert not duplicate

    async def test_gradient_that_cannot_be_fetched(self, bench: Bench) -> None:
        acc = bench.accumulator()

        async def broken(use: Callable[[Gradient], Awaitable[T]]) -> T:
            raise NotFoundError("no tensor")

        with pytest.raises(NotFoundError):
            await acc.apply(ID, Contribution(), broken)
        await turns()
        assert not (await apply(acc, 1, call=ID))[1]


class TestRegistry:
    def test_same_name_and_spec(self, bench: Bench) -> None:
        first = bench.accumulator()
        again, created = bench.registry.create(KEY, AccumulatorSpec((ComponentSpec("", F32),)))
        assert again is first
        assert not created

    def test_containers_are_apart(self, bench: Bench) -> None:
        spec = AccumulatorSpec((ComponentSpec("", F32),))
        first, _ = bench.registry.create(ResourceKey("a", "x"), spec)
        second, _ = bench.registry.create(ResourceKey("b", "x"), spec)
        assert first is not second

    def test_incarnations(self, bench: Bench) -> None:
        first = bench.accumulator()
        bench.registry.delete(KEY)
        second = bench.accumulator()
        assert bench.registry.get(KEY, second.incarnation) is second
        with pytest.raises(NotFoundError, match="was deleted; another one has this name now"):
            bench.registry.get(KEY, first.incarnation)
        assert not bench.registry.delete(KEY, first.incarnation)

    def test_pages(self, bench: Bench) -> None:
        spec = AccumulatorSpec((ComponentSpec("", F32),))
        for name in ("c", "a", "b"):
            bench.registry.create(ResourceKey("x", name), spec)
        bench.registry.create(ResourceKey("y", "aa"), spec)
        assert [key.name for key, _ in bench.registry.page("x", "", 2)] == ["a", "b"]
        assert [key.name for key, _ in bench.registry.page("x", "b", 2)] == ["c"]
