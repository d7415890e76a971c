"""What accumulators have beyond TensorFlow's, on the core: no socket, no thread, a clock of our own."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.gradient import Contribution, Gradient, SparseSlices
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.registry import AccumulatorKey, AccumulatorRegistry
from gradserve_server.accumulators.spec import (
    AccumulatorSpec,
    ComponentSpec,
    Layout,
    PartialShape,
    Reduction,
)
from gradserve_server.config import LimitsConfig
from gradserve_server.devices.compute import Compute, InlineCompute
from gradserve_server.errors import (
    AbortedError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    ResourceExhaustedError,
    UnavailableError,
)
from gradserve_server.tensors.quotas import Quota

F32 = np.dtype(np.float32)
KEY = AccumulatorKey("test", "acc")


class Bench:
    """A registry with all that it needs, to be looked at."""

    def __init__(self, compute: Compute | None = None, limit: int = 1 << 40, **limits: Any) -> None:
        self.now = 0.0
        self.memory = Quota(limit, "bytes of tensor memory")
        self.registry = AccumulatorRegistry(
            compute=compute or InlineCompute(),
            allocate=np.empty,
            memory=self.memory,
            limits=LimitsConfig(**limits),
            clock=lambda: self.now,
            new_incarnation=map(str, itertools.count()).__next__,
        )

    def accumulator(self, *components: ComponentSpec, **spec: Any) -> Accumulator:
        parts = components or (ComponentSpec("", F32),)
        return self.registry.create(KEY, AccumulatorSpec(parts, **spec))[0]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def gradient(*values: float) -> Callable[[], Any]:
    array = np.array(values, np.float32)
    return lambda: nullcontext(Gradient({"": array}))


async def apply(acc: Accumulator, *values: float, call: RequestId | None = None, **contribution: Any) -> Any:
    return await acc.apply(call, Contribution(**contribution), gradient(*values))


async def take(acc: Accumulator, num_required: int, call: RequestId | None = None, timeout: float | None = 5) -> Any:
    return await acc.take(call, num_required, timeout)


def value_of(average: Any) -> list[float]:
    return average.values[""].tolist()  # type: ignore[no-any-return]


async def turns(count: int = 5) -> None:
    """Lets every task that can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)


ID = RequestId("a", 7, b"content")


class TestExactlyOnce:
    async def test_second_apply_gets_the_first_answer(self, bench: Bench) -> None:
        acc = bench.accumulator()
        first, duplicate = await apply(acc, 1, call=ID)
        again, duplicate_again = await apply(acc, 1, call=ID)
        assert (duplicate, duplicate_again) == (False, True)
        assert again is first
        assert acc.num_accumulated == 1

    async def test_second_stale_apply_stays_stale(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await acc.set_global_step(5)
        await apply(acc, 1, call=ID, local_step=3)
        await acc.set_global_step(0)
        applied, duplicate = await apply(acc, 1, call=ID, local_step=3)
        assert applied.round is None
        assert duplicate

    async def test_second_take_gets_the_same_average(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await apply(acc, 4)
        first, _ = await take(acc, 1, ID)
        again, duplicate = await take(acc, 1, ID)
        assert duplicate
        assert again is first
        assert acc.state.global_step == 1

    async def test_take_whose_average_is_gone(self, bench: Bench) -> None:
        acc = bench.accumulator(keep_averages=2)
        for step in range(3):
            await apply(acc, step, local_step=step)
            await take(acc, 1, RequestId("a", step))
        assert value_of((await take(acc, 1, RequestId("a", 1)))[0]) == [1]
        with pytest.raises(AbortedError, match="ended with step 1, whose average is no longer kept"):
            await take(acc, 1, RequestId("a", 0))

    async def test_take_whose_step_came_again(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await apply(acc, 4)
        await take(acc, 1, ID)
        await acc.set_global_step(0)
        await apply(acc, 9)
        assert (await take(acc, 1))[0].step == 1
        with pytest.raises(AbortedError, match="ended with step 1, whose average is no longer kept"):
            await take(acc, 1, ID)

    async def test_retry_of_a_waiting_take_joins_it(self, bench: Bench) -> None:
        acc = bench.accumulator()
        first = asyncio.create_task(take(acc, 2, ID))
        await turns()
        second = asyncio.create_task(take(acc, 2, ID))
        await turns()
        assert acc.state.num_waiting == 1
        first.cancel()
        await turns()
        assert acc.state.num_waiting == 1, "the retry waits on in the same place"
        await apply(acc, 1)
        await apply(acc, 3)
        average, duplicate = await second
        assert value_of(average) == [2]
        assert duplicate

    async def test_cancelled_take_is_forgotten(self, bench: Bench) -> None:
        acc = bench.accumulator()
        first = asyncio.create_task(take(acc, 1, ID))
        await turns()
        first.cancel()
        await turns()
        assert acc.state.num_waiting == 0
        await apply(acc, 5)
        average, duplicate = await take(acc, 1, ID)
        assert value_of(average) == [5]
        assert not duplicate

    async def test_failed_apply_is_forgotten(self, bench: Bench) -> None:
        acc = bench.accumulator(ComponentSpec("", F32, PartialShape((1,))))
        with pytest.raises(InvalidArgumentError):
            await apply(acc, 1, 2, call=ID)
        await turns()
        _, duplicate = await apply(acc, 1, call=ID)
        assert not duplicate

    async def test_too_old(self) -> None:
        acc = Bench(id_window=4).accumulator()
        for sequence in range(10):
            await apply(acc, 1, call=RequestId("a", sequence))
        for sequence in (6, 9):
            assert (await apply(acc, 1, call=RequestId("a", sequence)))[1]
        for sequence in (0, 5):
            with pytest.raises(AbortedError, match=f"a:{sequence} is older than the 4 latest"):
                await apply(acc, 1, call=RequestId("a", sequence))
        assert acc.num_accumulated == 10

    async def test_numbers_need_not_be_consecutive_nor_in_order(self) -> None:
        acc = Bench(id_window=4).accumulator()
        for sequence in (1_000_000, 5, 2**63, 77):
            assert not (await apply(acc, 1, call=RequestId("a", sequence)))[1]
        assert acc.num_accumulated == 4

    async def test_same_id_with_other_content(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await apply(acc, 1, call=ID)
        with pytest.raises(InvalidArgumentError, match="expected the same content in every call with request_id a:7"):
            await apply(acc, 1, call=RequestId("a", 7, b"other"))
        assert acc.num_accumulated == 1

    async def test_clients_are_apart(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await apply(acc, 1, call=RequestId("a", 1))
        assert not (await apply(acc, 1, call=RequestId("b", 1)))[1]

    async def test_silent_clients_make_room_and_others_do_not(self) -> None:
        bench = Bench(max_clients=2, client_memory_seconds=10)
        acc = bench.accumulator()
        await apply(acc, 1, call=RequestId("a", 1))
        bench.now = 6
        await apply(acc, 1, call=RequestId("b", 1))
        with pytest.raises(ResourceExhaustedError, match="too many clients"):
            await apply(acc, 1, call=RequestId("c", 1))
        bench.now = 11
        await apply(acc, 1, call=RequestId("c", 1))
        assert acc.num_accumulated == 3

    async def test_apply_goes_on_when_its_caller_is_gone(self) -> None:
        compute = HeldCompute()
        acc = Bench(compute).accumulator()
        first = asyncio.create_task(apply(acc, 1, call=ID))
        await compute.begun.wait()
        first.cancel()
        await turns()
        second = asyncio.create_task(apply(acc, 1, call=ID))
        await turns()
        compute.go_on.set()
        _, duplicate = await second
        assert duplicate
        assert acc.num_accumulated == 1


class HeldCompute:
    """Arithmetic that waits to be let go on."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def run(self, num_bytes: int, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.begun.set()
        await self.go_on.wait()
        return function(*args, **kwargs)


class TestWaiting:
    async def test_cancelled_head_lets_those_behind_go(self, bench: Bench) -> None:
        acc = bench.accumulator()
        head = asyncio.create_task(take(acc, 3))
        await turns()
        behind = asyncio.create_task(take(acc, 1))
        await turns()
        await apply(acc, 5)
        assert not behind.done()
        head.cancel()
        average, _ = await behind
        assert value_of(average) == [5]

    async def test_cancelled_take_changes_nothing(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await apply(acc, 5)
        before = acc.state
        task = asyncio.create_task(take(acc, 2))
        await turns()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert acc.state == before
        assert bench.registry.waiters.used == 0

    async def test_deadline_tells_who_is_missing(self, bench: Bench) -> None:
        acc = bench.accumulator()
        for worker in ("w0", "w1", "w2"):
            await apply(acc, 1, worker_id=worker)
        await take(acc, 3)
        await apply(acc, 1, worker_id="w1", local_step=1)
        with pytest.raises(DeadlineExceededError) as failure:
            await take(acc, 3, timeout=0.01)
        message = failure.value.message
        assert "1 gradient is in" in message
        assert "workers: w1;" in message
        assert "of the previous round missing: w0, w2" in message
        assert acc.state.num_waiting == 0

    async def test_take_being_served_outlasts_its_deadline(self) -> None:
        compute = HeldCompute()
        compute.go_on.set()
        acc = Bench(compute).accumulator()
        await apply(acc, 5)
        compute.go_on.clear()
        compute.begun.clear()
        task = asyncio.create_task(take(acc, 1, timeout=0.01))
        await compute.begun.wait()
        await asyncio.sleep(0.02)  # the deadline itself is what is waited for
        assert not task.done()
        compute.go_on.set()
        average, _ = await task
        assert value_of(average) == [5]

    async def test_delete_ends_waits(self, bench: Bench) -> None:
        acc = bench.accumulator()
        tasks = [
            asyncio.create_task(take(acc, 9)),
            asyncio.create_task(acc.read_average(1, 5)),
            asyncio.create_task(push_pull(acc, 1, num_required=2)),
        ]
        await turns()
        assert bench.registry.delete(KEY)
        for task in tasks:
            with pytest.raises(AbortedError, match="accumulator 'test/acc' was deleted"):
                await task
        assert bench.memory.used == 0
        assert bench.registry.waiters.used == 0
        with pytest.raises(NotFoundError):
            bench.registry.get(KEY)
        with pytest.raises(AbortedError):
            await apply(acc, 1)

    async def test_shutdown_ends_waits(self, bench: Bench) -> None:
        acc = bench.accumulator()
        task = asyncio.create_task(take(acc, 1))
        await turns()
        bench.registry.close()
        with pytest.raises(UnavailableError):
            await task

    async def test_waiters_are_limited(self) -> None:
        bench = Bench(max_waiters=2)
        acc = bench.accumulator()
        tasks = [asyncio.create_task(take(acc, 1)) for _ in range(2)]
        await turns()
        with pytest.raises(ResourceExhaustedError, match="too many waiting calls: 1 asked for, 2 in use, 2 allowed"):
            await take(acc, 1)
        with pytest.raises(ResourceExhaustedError):
            await push_pull(acc, 1, num_required=1)
        assert acc.num_accumulated == 0
        for task in tasks:
            task.cancel()
        await turns()
        assert bench.registry.waiters.used == 0


async def push_pull(
    acc: Accumulator, *values: float, num_required: int, call: RequestId | None = None, **contribution: Any
) -> Any:
    return await acc.push_pull(call, Contribution(**contribution), gradient(*values), num_required, 5)


class TestPushPull:
    async def test_everybody_gets_the_average_of_the_round(self, bench: Bench) -> None:
        acc = bench.accumulator()
        results = await asyncio.gather(*(push_pull(acc, value, num_required=3) for value in (1, 2, 6)))
        averages = [average for _, average, _ in results]
        assert all(average is averages[0] for average in averages)
        assert value_of(averages[0]) == [3]
        assert acc.state.global_step == 1

    async def test_rounds_do_not_mix(self, bench: Bench) -> None:
        acc = bench.accumulator()
        results = await asyncio.gather(*(push_pull(acc, value, num_required=1, local_step=99) for value in range(20)))
        assert [(average.step, value_of(average)) for _, average, _ in results] == [(i + 1, [i]) for i in range(20)]

    async def test_stale_gets_the_newest_average_at_once(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await push_pull(acc, 8, num_required=1)
        applied, average, _ = await push_pull(acc, 1, num_required=99, local_step=0)
        assert applied.round is None
        assert (average.step, value_of(average)) == (1, [8])

    async def test_stale_before_any_round(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await acc.set_global_step(3)
        applied, average, _ = await push_pull(acc, 1, num_required=1)
        assert applied.round is None
        assert average is None

    async def test_giving_up_leaves_the_gradient_in(self, bench: Bench) -> None:
        acc = bench.accumulator()
        task = asyncio.create_task(push_pull(acc, 2, num_required=2))
        await turns()
        task.cancel()
        await turns()
        assert (acc.num_accumulated, acc.state.num_waiting) == (1, 0)
        _, average, _ = await push_pull(acc, 4, num_required=2)
        assert value_of(average) == [3]

    async def test_retry_waits_on_for_the_same_round(self, bench: Bench) -> None:
        acc = bench.accumulator()
        first = asyncio.create_task(push_pull(acc, 2, num_required=2, call=ID))
        await turns()
        first.cancel()
        await turns()
        retry = asyncio.create_task(push_pull(acc, 2, num_required=2, call=ID))
        await turns()
        await push_pull(acc, 4, num_required=2)
        _, average, duplicate = await retry
        assert duplicate
        assert value_of(average) == [3]
        assert acc.num_accumulated == 0

    async def test_retry_after_the_round(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await push_pull(acc, 2, num_required=1, call=ID)
        _, average, duplicate = await push_pull(acc, 2, num_required=1, call=ID)
        assert duplicate
        assert value_of(average) == [2]
        await push_pull(acc, 9, num_required=1, local_step=1)
        with pytest.raises(AbortedError, match="no longer kept"):
            await push_pull(acc, 2, num_required=1, call=ID)

    async def test_a_taker_that_ends_the_round_serves_all(self, bench: Bench) -> None:
        acc = bench.accumulator()
        taker = asyncio.create_task(take(acc, 2))
        await turns()
        pushers = [asyncio.create_task(push_pull(acc, value, num_required=5)) for value in (1, 3)]
        taken, _ = await taker
        for pusher in pushers:
            _, average, _ = await pusher
            assert average is taken

    async def test_pushers_stand_in_the_queue(self, bench: Bench) -> None:
        acc = bench.accumulator()
        head = asyncio.create_task(take(acc, 3))
        await turns()
        pushers = [asyncio.create_task(push_pull(acc, value, num_required=2)) for value in (1, 3)]
        await turns()
        assert not any(pusher.done() for pusher in pushers)
        head.cancel()
        for pusher in pushers:
            assert value_of((await pusher)[1]) == [2]


class TestReadAverage:
    async def test_readers_wait_for_their_step(self, bench: Bench) -> None:
        acc = bench.accumulator()
        readers = [asyncio.create_task(acc.read_average(2, 5)) for _ in range(3)]
        newest = asyncio.create_task(acc.read_average(None, 5))
        for step in range(2):
            await apply(acc, step + 1, local_step=step)
            await take(acc, 1)
        assert [value_of(await reader) for reader in readers] == [[2]] * 3
        assert value_of(await newest) == [1]

    async def test_a_reader_gets_its_step_even_if_the_next_round_is_fast(self, bench: Bench) -> None:
        acc = bench.accumulator()
        reader = asyncio.create_task(acc.read_average(1, 5))
        await turns()
        for step in range(5):
            await acc.apply(None, Contribution(local_step=step), gradient(step))
            await acc.take(None, 1, None)
        assert value_of(await reader) == [0]

    async def test_gone_and_skipped_steps(self, bench: Bench) -> None:
        acc = bench.accumulator(keep_averages=2)
        for step in range(3):
            await apply(acc, step, local_step=step)
            await take(acc, 1)
        assert acc.state.kept_steps == (2, 3)
        assert value_of(await acc.read_average(None, 5)) == [2]
        for step in (1, 0, -5):
            with pytest.raises(OutOfRangeError, match=rf"no average of step {step} is kept; .*\(2, 3\)"):
                await acc.read_average(step, 5)
        waiting = asyncio.create_task(acc.read_average(10, 5))
        await turns()
        await acc.set_global_step(10)
        with pytest.raises(OutOfRangeError, match="no average of step 10"):
            await waiting

    async def test_deadline(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await apply(acc, 1, worker_id="w3")
        with pytest.raises(DeadlineExceededError, match=r"the average of step 1 .*workers: w3"):
            await acc.read_average(1, 0.01)
        with pytest.raises(DeadlineExceededError, match="any average"):
            await acc.read_average(None, 0.01)
        assert bench.registry.waiters.used == 0


class TestArithmetic:
    async def test_weighted_mean(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await apply(acc, 1, 10, weight=3)
        await apply(acc, 5, 50, weight=1)
        average, _ = await take(acc, 2)
        assert value_of(average) == [2, 20]
        assert average.total_weight == 4

    async def test_tree_of_aggregators_is_exact(self, bench: Bench) -> None:
        leaves = [Bench().accumulator() for _ in range(2)]
        values = [[1.0, 2.0, 6.0], [16.0]]
        root = bench.accumulator()
        for leaf, mine in zip(leaves, values, strict=True):
            for value in mine:
                await apply(leaf, value)
            average, _ = await take(leaf, 1)
            await apply(root, *value_of(average), weight=average.total_weight)
        assert value_of((await take(root, 2))[0]) == [(1 + 2 + 6 + 16) / 4]

    @pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
    async def test_bad_weight(self, bench: Bench, weight: float) -> None:
        with pytest.raises(InvalidArgumentError, match="expected a positive, finite weight"):
            await apply(bench.accumulator(), 1, weight=weight)

    @pytest.mark.parametrize("size", [1, 70_000])
    async def test_weighted_sum_of_any_size(self, bench: Bench, size: int) -> None:
        acc = bench.accumulator(reduction=Reduction.SUM)
        first, second = np.random.default_rng(0).normal(size=(2, size)).astype(np.float32)
        await acc.apply(None, Contribution(weight=0.5), lambda: nullcontext(Gradient({"": first})))
        await acc.apply(None, Contribution(weight=3.0), lambda: nullcontext(Gradient({"": second})))
        average, _ = await take(acc, 2)
        np.testing.assert_allclose(average.values[""], first * 0.5 + second * 3.0, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize(
        ("dtype", "accumulate", "values", "expected"),
        [
            (np.float16, None, [2048, 1, 1], 2050),
            (np.float16, np.float16, [2048, 1, 1], 2048),
            (np.float16, None, [60000, 60000], np.inf),
            (ml_dtypes.bfloat16, None, [256, 1, 1], 258),
            (ml_dtypes.bfloat16, ml_dtypes.bfloat16, [256, 1, 1], 256),
            (np.float32, None, [2**24, 1, 1], 2**24),
            (np.float32, np.float64, [2**24, 1, 1], 2**24 + 2),
            (np.float64, None, [2**24, 1, 1], 2**24 + 2),
        ],
    )
    async def test_type_of_the_sum(
        self, bench: Bench, dtype: Any, accumulate: Any, values: list[float], expected: float
    ) -> None:
        acc = bench.accumulator(
            ComponentSpec("", np.dtype(dtype)),
            reduction=Reduction.SUM,
            accumulate_dtype=None if accumulate is None else np.dtype(accumulate),
        )
        for value in values:
            array = np.array([value], dtype)
            await acc.apply(None, Contribution(), lambda array=array: nullcontext(Gradient({"": array})))
        taken = (await take(acc, 1))[0].values[""]
        assert taken.dtype == dtype
        assert float(taken[0]) == expected

    async def test_half_divides_as_tensorflow(self, bench: Bench) -> None:
        half = np.dtype(np.float16)
        acc = bench.accumulator(ComponentSpec("", half), accumulate_dtype=half)
        for value in (2048, 1, 1):
            array = np.array([value], half)
            await acc.apply(None, Contribution(), lambda array=array: nullcontext(Gradient({"": array})))
        assert float((await take(acc, 1))[0].values[""][0]) == 682.5

    async def test_deterministic_sums_do_not_depend_on_arrival(self) -> None:
        rng = np.random.default_rng(0)
        gradients = [(rng.normal(size=1000) * 10.0**e).astype(np.float32) for e in range(-3, 5)]
        results = set()
        for order in ([*range(8)], [*reversed(range(8))], [3, 7, 1, 0, 5, 2, 6, 4]):
            acc = Bench().accumulator(deterministic=True)
            for i in order:
                await acc.apply(
                    None,
                    Contribution(worker_id=f"w{i // 2}", sequence=i, weight=1 + i / 8),
                    lambda i=i: nullcontext(Gradient({"": gradients[i]})),
                )
            results.add((await take(acc, 8))[0].values[""].tobytes())
        assert len(results) == 1

    async def test_deterministic_needs_a_worker(self, bench: Bench) -> None:
        acc = bench.accumulator(deterministic=True)
        with pytest.raises(InvalidArgumentError, match="expected a worker_id"):
            await apply(acc, 1)

    async def test_components_are_atomic(self, bench: Bench) -> None:
        acc = bench.accumulator(
            ComponentSpec("w", F32, PartialShape((2,))), ComponentSpec("e", F32, PartialShape((4, 1)), Layout.SPARSE)
        )
        w = np.ones(2, np.float32)
        good = SparseSlices(np.array([1]), np.ones((1, 1), np.float32))
        bad = SparseSlices(np.array([4]), np.ones((1, 1), np.float32))
        with pytest.raises(InvalidArgumentError, match="index is 4 exceeded 4"):
            await acc.apply(None, Contribution(), lambda: nullcontext(Gradient({"w": w, "e": bad})))
        assert (acc.num_accumulated, bench.memory.used) == (0, 0)
        await acc.apply(None, Contribution(), lambda: nullcontext(Gradient({"w": w, "e": good})))
        average, _ = await take(acc, 1)
        assert list(average.values) == ["w", "e"]

    async def test_malformed_is_an_error_even_when_stale(self, bench: Bench) -> None:
        acc = bench.accumulator(ComponentSpec("", F32, PartialShape((1,))))
        await acc.set_global_step(5)
        with pytest.raises(InvalidArgumentError, match=r"expected \[1\], got \[2\]"):
            await apply(acc, 1, 2, local_step=0)

    async def test_stale_need_not_fit_the_round(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await acc.set_global_step(5)
        await apply(acc, 1, local_step=5)
        applied, _ = await apply(acc, 1, 2, local_step=0)
        assert applied.round is None


class TestMemory:
    async def test_owned_gradient_becomes_the_sum(self, bench: Bench) -> None:
        acc = bench.accumulator()
        mine = np.ones(4, np.float32)
        await acc.apply(None, Contribution(), lambda: nullcontext(Gradient({"": mine}, owned=True)))
        average, _ = await take(acc, 1)
        assert average.values[""] is mine

    async def test_other_gradients_are_not_touched(self, bench: Bench) -> None:
        acc = bench.accumulator()
        mine = np.ones(4, np.float32)
        for _ in range(2):
            await acc.apply(None, Contribution(weight=2), lambda: nullcontext(Gradient({"": mine})))
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
            await take(acc, 1)
        compute.failing = False
        assert acc.state == before
        assert value_of((await take(acc, 1))[0]) == [3]

    async def test_gradient_that_cannot_be_fetched(self, bench: Bench) -> None:
        acc = bench.accumulator()

        @contextmanager
        def broken() -> Iterator[Gradient]:
            raise NotFoundError("no tensor")
            yield

        with pytest.raises(NotFoundError):
            await acc.apply(ID, Contribution(), broken)
        await turns()
        assert not (await apply(acc, 1, call=ID))[1]


class FailingCompute(InlineCompute):
    failing = False

    async def run(self, num_bytes: int, function: Any, *args: Any, **kwargs: Any) -> Any:
        if self.failing:
            raise MemoryError
        return await super().run(num_bytes, function, *args, **kwargs)


class TestRegistry:
    def test_same_name_and_spec(self, bench: Bench) -> None:
        first = bench.accumulator()
        again, created = bench.registry.create(KEY, AccumulatorSpec((ComponentSpec("", F32),)))
        assert again is first
        assert not created

    def test_containers_are_apart(self, bench: Bench) -> None:
        spec = AccumulatorSpec((ComponentSpec("", F32),))
        first, _ = bench.registry.create(AccumulatorKey("a", "x"), spec)
        second, _ = bench.registry.create(AccumulatorKey("b", "x"), spec)
        assert first is not second

    def test_incarnations(self, bench: Bench) -> None:
        first = bench.accumulator()
        bench.registry.delete(KEY)
        second = bench.accumulator()
        assert bench.registry.get(KEY, second.incarnation) is second
        with pytest.raises(NotFoundError, match="was deleted; the one of that name now is another"):
            bench.registry.get(KEY, first.incarnation)
        assert not bench.registry.delete(KEY, first.incarnation)

    def test_pages(self, bench: Bench) -> None:
        spec = AccumulatorSpec((ComponentSpec("", F32),))
        for name in ("c", "a", "b"):
            bench.registry.create(AccumulatorKey("x", name), spec)
        bench.registry.create(AccumulatorKey("y", "aa"), spec)
        assert [key.name for key, _ in bench.registry.page("x", "", 2)] == ["a", "b"]
        assert [key.name for key, _ in bench.registry.page("x", "b", 2)] == ["c"]
