"""A worker counts once a round: always in a push_pull, in an apply where the accumulator says so."""

import asyncio

import pytest

from gradserve_server.accumulators.gradient import Contribution, Summand
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.errors import DeadlineExceededError, InvalidArgumentError
from tests.accumulators.bench import ID, Bench, apply, gradient, push_pull, turns, value_of


class TestPushPull:
    async def test_a_worker_alone_is_no_quorum(self, bench: Bench) -> None:
        acc = bench.accumulator()
        for attempt in range(5):
            task = asyncio.create_task(push_pull(acc, 1, num_required=3, worker_id="w0", call=RequestId("a", attempt)))
            await turns()
            task.cancel()
            await turns()
        assert (acc.num_accumulated, acc.state.worker_ids) == (1, ("w0",))

    async def test_the_second_call_waits_for_the_round_of_the_first(self, bench: Bench) -> None:
        acc = bench.accumulator()
        first = asyncio.create_task(push_pull(acc, 2, num_required=2, worker_id="w0"))
        await turns()
        first.cancel()
        await turns()
        second = asyncio.create_task(push_pull(acc, 100, num_required=2, worker_id="w0"))
        await turns()
        await push_pull(acc, 4, num_required=2, worker_id="w1")
        applied, average, duplicate = await second
        assert (applied.outcome, duplicate) == (Outcome.ALREADY_COUNTED, False)
        assert applied.num_accumulated == 1
        assert value_of(average) == [3]

    async def test_both_calls_at_once_get_the_average(self, bench: Bench) -> None:
        acc = bench.accumulator()
        tasks = [asyncio.create_task(push_pull(acc, value, num_required=2, worker_id="w0")) for value in (2, 100)]
        await turns()
        await push_pull(acc, 4, num_required=2, worker_id="w1")
        assert [value_of((await task)[1]) for task in tasks] == [[3], [3]]

    async def test_repeated_under_its_id(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await apply(acc, 2, worker_id="w0")
        task = asyncio.create_task(push_pull(acc, 9, num_required=2, worker_id="w0", call=ID))
        await turns()
        task.cancel()
        await turns()
        await push_pull(acc, 4, num_required=2, worker_id="w1")
        applied, average, duplicate = await push_pull(acc, 9, num_required=2, worker_id="w0", call=ID)
        assert (applied.outcome, duplicate, value_of(average)) == (Outcome.ALREADY_COUNTED, True, [3])

    async def test_in_the_next_round_the_worker_counts_again(self, bench: Bench) -> None:
        acc = bench.accumulator()
        for step in range(3):
            applied, _, _ = await push_pull(acc, 1, num_required=1, worker_id="w0", local_step=step)
            assert applied.outcome is Outcome.ACCEPTED

    async def test_stale_comes_first(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await apply(acc, 2, worker_id="w0")
        await acc.set_global_step(5)
        applied, _, _ = await push_pull(acc, 1, num_required=1, worker_id="w0", local_step=4)
        assert applied.outcome is Outcome.STALE

    async def test_what_is_dropped_is_checked_all_the_same(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await apply(acc, 2, worker_id="w0")
        with pytest.raises(InvalidArgumentError, match="Shape mismatch"):
            await push_pull(acc, 1, 2, num_required=1, worker_id="w0")

    async def test_switched_off(self, bench: Bench) -> None:
        acc = bench.accumulator()
        results = await asyncio.gather(
            *(push_pull(acc, value, num_required=2, worker_id="w0", one_per_worker=False) for value in (1, 3))
        )
        assert [value_of(average) for _, average, _ in results] == [[2], [2]]

    async def test_workers_without_an_id_all_count(self, bench: Bench) -> None:
        acc = bench.accumulator()
        results = await asyncio.gather(*(push_pull(acc, value, num_required=2) for value in (1, 3)))
        assert [value_of(average) for _, average, _ in results] == [[2], [2]]

    async def test_diagnosis_counts_a_worker_once(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await apply(acc, 1, worker_id="w0")
        task = acc.push_pull(None, Contribution(worker_id="w0"), gradient(1), 2, 0.01)
        with pytest.raises(DeadlineExceededError, match=r"1 gradient is in \(workers: w0;"):
            await task


class TestApply:
    async def test_every_gradient_counts_as_in_tensorflow(self, bench: Bench) -> None:
        acc = bench.accumulator()
        for _ in range(3):
            assert (await apply(acc, 1, worker_id="w0"))[0].outcome is Outcome.ACCEPTED
        assert acc.num_accumulated == 3

    async def test_one_per_worker_where_the_accumulator_says_so(self, bench: Bench) -> None:
        acc = bench.accumulator(one_per_worker=True)
        outcomes = [
            (await apply(acc, value, worker_id=worker))[0] for value, worker in ((1, "w0"), (9, "w0"), (3, "w1"))
        ]
        assert [each.outcome for each in outcomes] == [Outcome.ACCEPTED, Outcome.ALREADY_COUNTED, Outcome.ACCEPTED]
        assert [each.num_accumulated for each in outcomes] == [1, 1, 2]

    async def test_push_pull_cannot_switch_off_the_rule_of_the_accumulator(self, bench: Bench) -> None:
        acc = bench.accumulator(one_per_worker=True)
        await apply(acc, 1, worker_id="w0")
        applied, _, _ = await push_pull(acc, 9, num_required=1, worker_id="w0", one_per_worker=False)
        assert applied.outcome is Outcome.ALREADY_COUNTED


class TestTwoClients:
    """One worker_id of two clients, "a" and "b"."""

    async def test_the_second_is_told_while_the_first_waits(self, bench: Bench) -> None:
        acc = bench.accumulator()
        first = asyncio.create_task(push_pull(acc, 2, num_required=2, worker_id="w0", call=RequestId("a", 1)))
        await turns()
        with pytest.raises(InvalidArgumentError, match="two clients use worker_id 'w0' at once") as told:
            await push_pull(acc, 4, num_required=2, worker_id="w0", call=RequestId("b", 1))
        assert told.value.field == "worker_id"
        assert acc.num_accumulated == 1
        await push_pull(acc, 4, num_required=2, worker_id="w1", call=RequestId("b", 2))
        assert value_of((await first)[1]) == [3]

    async def test_even_if_the_round_of_the_first_ends_at_that_moment(self, bench: Bench) -> None:
        acc = bench.accumulator()
        first = asyncio.create_task(push_pull(acc, 2, num_required=2, worker_id="w0", call=RequestId("a", 1)))
        await turns()
        second = asyncio.create_task(push_pull(acc, 9, num_required=2, worker_id="w0", call=RequestId("b", 1)))
        await turns()
        await push_pull(acc, 4, num_required=2, worker_id="w1", call=RequestId("c", 1))
        assert value_of((await first)[1]) == [3]
        with pytest.raises(InvalidArgumentError, match="two clients use worker_id 'w0' at once"):
            await second

    async def test_one_that_was_killed_leaves_its_place(self, bench: Bench) -> None:
        acc = bench.accumulator()
        first = asyncio.create_task(push_pull(acc, 2, num_required=2, worker_id="w0", call=RequestId("a", 1)))
        await turns()
        second = asyncio.create_task(push_pull(acc, 9, num_required=2, worker_id="w0", call=RequestId("b", 1)))
        await turns()
        first.cancel()  # the new connection arrived before the end of the old one
        await turns()
        await push_pull(acc, 4, num_required=2, worker_id="w1", call=RequestId("c", 1))
        applied, average, _ = await second
        assert (applied.outcome, value_of(average)) == (Outcome.ALREADY_COUNTED, [3])

    @pytest.mark.parametrize(
        ("calls", "options"),
        [
            ((RequestId("a", 1), RequestId("a", 2)), {}),
            ((RequestId("a", 1), RequestId("a-chosen", 1)), {}),
            ((RequestId("a", 1), None), {}),
            ((None, RequestId("a", 1)), {}),
            ((RequestId("a", 1), RequestId("b", 1)), {"one_per_worker": False}),
        ],
        ids=["one client", "numbered by its user", "the second without an id", "the first without", "all count"],
    )
    async def test_allowed(
        self, bench: Bench, calls: tuple[RequestId | None, RequestId | None], options: dict[str, bool]
    ) -> None:
        acc = bench.accumulator()
        waiting = [
            asyncio.create_task(push_pull(acc, 2, num_required=3, worker_id="w0", call=call, **options))
            for call in calls
        ]
        await turns()
        for number in range(2):
            await apply(acc, 2, worker_id=f"other {number}")
        assert [value_of(average) for _, average, _ in await asyncio.gather(*waiting)] == [[2], [2]]

    async def test_an_apply_that_counts_once(self, bench: Bench) -> None:
        acc = bench.accumulator(one_per_worker=True)
        first = asyncio.create_task(push_pull(acc, 2, num_required=2, worker_id="w0", call=RequestId("a", 1)))
        await turns()
        with pytest.raises(InvalidArgumentError, match="two clients use worker_id 'w0' at once"):
            await apply(acc, 4, worker_id="w0", call=RequestId("b", 1))
        first.cancel()

    async def test_in_a_sum(self, bench: Bench) -> None:
        acc = bench.accumulator()
        summands = tuple(Summand(1.0, f"w{number}", RequestId(f"a{number}", 1)) for number in range(2))
        contribution = Contribution(sum_of=summands, weight=2.0)
        first = asyncio.create_task(acc.push_pull(RequestId("agg", 1), contribution, gradient(4), 3, 5))
        await turns()
        with pytest.raises(InvalidArgumentError, match="two clients use worker_id 'w1' at once"):
            await push_pull(acc, 4, num_required=3, worker_id="w1", call=RequestId("b", 1))
        first.cancel()
