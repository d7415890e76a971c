"""What the server keeps beside tensors counts, and at least as much as it takes."""

import asyncio
import gc
import tracemalloc
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.spec import ComponentSpec, Layout, PartialShape
from gradserve_server.config import LimitsConfig
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.resources.budget import Budget
from gradserve_server.resources.registry import ResourceKey, Tombstones
from tests.accumulators.bench import F32, KEY, Bench, apply, take, turns
from tests.floods.test_lists import store_of
from tests.tensors.keeping import keep_now

TOO_MUCH = "too many bytes of bookkeeping"
MIB = 1 << 20


@contextmanager
def counted(bench: Bench) -> Iterator[None]:
    """Checks that what a block keeps takes no more memory than is counted."""
    gc.collect()
    before = bench.bookkeeping.used
    tracemalloc.start()
    try:
        yield
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept <= bench.bookkeeping.used - before


class TestWhatIsCounted:
    def test_accumulators(self, bench: Bench) -> None:
        with counted(bench):
            for number in range(200):
                bench.accumulator(key=ResourceKey("c" * 1000, f"{number}" * 300))

    @pytest.mark.parametrize("layout", [Layout.DENSE, Layout.SPARSE])
    def test_components(self, bench: Bench, layout: Layout) -> None:
        with counted(bench):
            dims = range(1000, 1008)
            components = [
                ComponentSpec(f"a component {number}", F32, PartialShape(tuple(dims)), layout) for number in range(2000)
            ]
            bench.accumulator(*components)
            del components

    def test_agreements(self, bench: Bench) -> None:
        with counted(bench):
            for number in range(20):
                agreement = {f"{number} {entry:0500}": f"{entry:1000}" for entry in range(64)}
                bench.accumulator(key=ResourceKey("c", str(number)), agreement=agreement)
            del agreement

    async def test_records_of_calls(self, bench: Bench) -> None:
        acc = bench.accumulator()
        with counted(bench):
            for number in range(3000):
                await apply(acc, 1, call=RequestId(f"client {number // 100:0100}", number, bytes(16)))

    async def test_workers(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await apply(acc, 1)
        with counted(bench):
            for number in range(2000):
                await apply(acc, 1, worker_id=f"{number:0256}")

    async def test_gradients_that_are_held(self, bench: Bench) -> None:
        acc = bench.accumulator(deterministic=True)
        with counted(bench):
            for number in range(500):
                await apply(acc, 1, worker_id=f"{number:0200}")

    async def test_waiting_calls(self, bench: Bench) -> None:
        acc = bench.accumulator()
        with counted(bench):
            waiting = [asyncio.create_task(take(acc, 1)) for _ in range(100)]
            await turns()
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_all_of_it_is_given_back(bench: Bench) -> None:
    acc = bench.accumulator(deterministic=True)
    for number in range(3):
        await apply(acc, 1, call=RequestId("a", number), worker_id=f"w{number}")
    await take(acc, 3, call=RequestId("a", 9))
    with pytest.raises(ResourceExhaustedError):
        await acc.apply(None, Contribution(worker_id="w"), refused)
    bench.registry.delete(KEY)
    assert bench.bookkeeping.used == 0


async def filled_up(applying: Awaitable[object]) -> None:
    """Lets a call succeed, or be refused because too much is kept."""
    with suppress(ResourceExhaustedError):
        await applying


def refuse(_use: object) -> Any:
    raise ResourceExhaustedError("no")


refused: Any = refuse


class TestLimits:
    """Each is refused with the numbers, and has no effect."""

    def test_components(self) -> None:
        bench = Bench(bookkeeping=MIB)
        with pytest.raises(ResourceExhaustedError, match=TOO_MUCH):
            bench.accumulator(*[ComponentSpec(str(number), F32) for number in range(2000)])
        assert (bench.bookkeeping.used, bench.registry.factory.count.used) == (0, 0)

    async def test_calls_of_many_clients(self) -> None:
        bench = Bench(bookkeeping=MIB)
        acc = bench.accumulator()
        while bench.bookkeeping.used < MIB - 4096:
            await apply(acc, 1, call=RequestId(f"client {acc.num_accumulated}", 1))
        for number in range(3):
            await filled_up(apply(acc, 1, call=RequestId(f"another client {number}", 1)))
        with pytest.raises(ResourceExhaustedError, match=TOO_MUCH):
            await apply(acc, 1, call=RequestId("yet another client", 1))
        assert 500 < acc.num_accumulated < 1000
        assert bench.bookkeeping.used <= MIB
        await apply(acc, 1)  # without an id, nothing need be remembered

    async def test_a_window_that_is_full_takes_no_more(self) -> None:
        bench = Bench(bookkeeping=MIB, id_window=100)
        acc = bench.accumulator()
        for number in range(5000):
            await apply(acc, 1, call=RequestId("a", number))
        assert bench.bookkeeping.used < MIB // 4

    async def test_workers(self) -> None:
        bench = Bench(bookkeeping=MIB)
        acc = bench.accumulator()
        while bench.bookkeeping.used <= MIB - 768:
            await apply(acc, 1, worker_id=f"w{acc.num_accumulated}")
        before = acc.state
        with pytest.raises(ResourceExhaustedError, match=TOO_MUCH):
            await apply(acc, 1, worker_id="one more")
        assert acc.state == before
        await apply(acc, 1, worker_id="w0")
        assert bench.bookkeeping.used <= MIB

    async def test_waiting_calls(self) -> None:
        bench = Bench(bookkeeping=MIB)
        acc = bench.accumulator()
        waiting = [asyncio.create_task(take(acc, 1)) for _ in range(200)]
        await turns()
        refused = [each for each in waiting if each.done()]
        assert 50 < len(refused) < 150
        for each in refused:
            with pytest.raises(ResourceExhaustedError, match=TOO_MUCH):
                each.result()
        await apply(acc, 1)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def test_tensors_without_elements() -> None:
    bookkeeping = Budget(MIB, "bytes of bookkeeping")
    handles = Budget(1 << 30, "tensor handles", cost=(bookkeeping, 1024))
    store = store_of(0, handles)
    gc.collect()
    tracemalloc.start()
    try:
        keep_now(store, [np.empty(0) for _ in range(1000)], None, shared=False)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept <= bookkeeping.used == 1000 * 1024
    with pytest.raises(ResourceExhaustedError, match="25600 asked for, 1024000 in use, 1048576 allowed"):
        keep_now(store, [np.empty(0)] * 25, None, shared=False)
    assert (bookkeeping.used, handles.used) == (1000 * 1024, 1000)
    store.delete([str(number) for number in range(1000)])
    assert (bookkeeping.used, handles.used) == (0, 0)


def test_a_budget_of_what_takes_from_another() -> None:
    total = Budget(100, "bytes")
    things = Budget(50, "things", cost=(total, 10))
    reservation = things.reserve(4)
    with reservation.another(2):
        assert total.used == 60
    with pytest.raises(ResourceExhaustedError, match="too many bytes: 70 asked for, 40 in use, 100 allowed"):
        things.reserve(7)
    assert (things.used, total.used) == (4, 40)
    reservation.settle(1)
    assert (things.used, total.used) == (1, 10)


@pytest.mark.parametrize(("max_bytes", "expected"), [(100, 16 * MIB), (64 * MIB, 16 * MIB), (1 << 34, 1 << 31)])
def test_how_much_is_allowed(max_bytes: int, expected: int) -> None:
    limits: dict[str, Any] = {"max_bytes": max_bytes}
    assert LimitsConfig(**limits).bookkeeping_bytes == expected


def test_long_names_of_what_was_deleted() -> None:
    tombstones: Tombstones[str] = Tombstones(10_000)
    names = [f"{number:01000}" for number in range(3000)]
    for name in names:
        tombstones.put(name, "it was old")
    known = [name for name in names if tombstones.reason(name)]
    assert known == names[-(MIB // 1000) :]
    for name in names:
        tombstones.remove(name)
    tombstones.put("a", "it was old")
    tombstones.put("a", "it was older")
    assert (tombstones.reason("a"), tombstones._length) == ("it was older", 1)


def test_tags_of_layers() -> None:
    gc.collect()
    tracemalloc.start()
    try:
        tags = tuple([f"{number:01000}" for number in range(1000)])
        names = [f"{number:0900}" for number in range(20)]
        config = BatchNormConfig(updates_collections=tags, variables_collections=dict.fromkeys(names, ("a",)))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept <= config.text_bytes
