"""Takes, push_pulls and readers that wait."""

import asyncio

import pytest

from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.errors import (
    AbortedError,
    DeadlineExceededError,
    NotFoundError,
    OutOfRangeError,
    ResourceExhaustedError,
    ServiceError,
    UnavailableError,
)
from tests.accumulators.bench import (
    ID,
    KEY,
    Bench,
    HeldCompute,
    apply,
    gradient,
    push_pull,
    take,
    turns,
    value_of,
)
from tests.servers.polling import PATIENCE_SECONDS


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
        assert bench.registry.factory.waiters.used == 0

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
        assert "missing from the previous round: w0, w2" in message
        assert acc.state.num_waiting == 0

    @pytest.mark.parametrize(
        ("previous", "present", "missing"),
        [
            ([], [], "unknown"),
            (["w0", "w1"], ["w0", "w1"], "none"),
            (["", ""], [], "unknown"),
            (["", ""], ["w0"], "unknown"),
            (["w0", "w1", ""], ["w1"], "w0, others unknown"),
            (["w0", ""], ["w0"], "unknown"),
        ],
    )
    async def test_deadline_does_not_say_none_where_nobody_knows(
        self, bench: Bench, previous: list[str], present: list[str], missing: str
    ) -> None:
        acc = bench.accumulator()
        for worker in previous:
            await apply(acc, 1, worker_id=worker)
        if previous:
            await take(acc, len(previous))
        for worker in present:
            await apply(acc, 1, worker_id=worker, local_step=1)
        with pytest.raises(DeadlineExceededError, match=f"missing from the previous round: {missing}\\)"):
            await take(acc, 9, timeout=0.01)

    async def test_take_being_served_outlasts_its_deadline(self) -> None:
        compute = HeldCompute()
        compute.go_on.set()
        acc = Bench(compute).accumulator()
        await apply(acc, 5)
        compute.go_on.clear()
        compute.begun.clear()
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(take(acc, 1, timeout=PATIENCE_SECONDS))
        await compute.begun.wait()
        behind = asyncio.create_task(take(acc, 1, timeout=PATIENCE_SECONDS))
        await turns()
        now = loop.time
        loop.time = lambda: now() + PATIENCE_SECONDS + 1  # type: ignore[method-assign]
        with pytest.raises(DeadlineExceededError):
            await behind
        assert not task.done()
        compute.go_on.set()
        average, _ = await task
        assert value_of(average) == [5]

    async def test_a_take_that_comes_while_the_sum_is_finished(self, bench: Bench) -> None:
        acc = bench.accumulator()
        finish, begun, go_on = acc._sum.finish, asyncio.Event(), asyncio.Event()

        async def held() -> None:
            begun.set()
            await go_on.wait()
            await finish()

        acc._sum.finish = held  # type: ignore[method-assign]
        applying = asyncio.create_task(apply(acc, 5))
        await begun.wait()
        taking = asyncio.create_task(take(acc, 1))
        await turns()
        assert not taking.done()
        go_on.set()
        average, _ = await taking
        assert value_of(average) == [5]
        await applying

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
        assert bench.registry.factory.waiters.used == 0
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

    @pytest.mark.parametrize(("ends", "error"), [("delete", AbortedError), ("close", UnavailableError)])
    async def test_a_push_pull_whose_gradient_is_being_added_ends_too(
        self, ends: str, error: type[ServiceError]
    ) -> None:
        compute = HeldCompute()
        bench = Bench(compute)
        acc = bench.accumulator()
        task = asyncio.create_task(push_pull(acc, 1, num_required=2))
        await compute.begun.wait()
        if ends == "delete":
            assert bench.registry.delete(KEY)
        else:
            bench.registry.close()
        compute.go_on.set()
        await turns()
        assert task.done()
        with pytest.raises(error, match="accumulator 'test/acc'"):
            await task
        assert (len(acc.queue), bench.registry.factory.waiters.used) == (0, 0)

    async def test_a_reader_who_comes_after_the_end_does_not_wait(self, bench: Bench) -> None:
        acc = bench.accumulator()
        assert bench.registry.delete(KEY)
        with pytest.raises(AbortedError, match="was deleted"):
            await acc._averages.history.read(None, 0)

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
        assert bench.registry.factory.waiters.used == 0


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
        await push_pull(acc, 9, num_required=1, local_step=1, call=RequestId(ID.client_id, ID.sequence + 1))
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
        await turns()
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
        assert bench.registry.factory.waiters.used == 0
