"""An average is kept until the calls it answers have received it."""

import asyncio

import pytest

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.errors import AbortedError, ResourceExhaustedError
from gradserve_server.runtime.event_loop import Turn
from tests.accumulators.bench import Bench, apply, push_pull, take, turns, value_of

LEASE = 60.0
ITEM_BYTES = 4


async def rounds(acc: Accumulator, count: int) -> None:
    """Ends rounds that nobody will ask about again."""
    for _ in range(count):
        await apply(acc, 99, local_step=1000)
        await take(acc, 1)


class TestLostReplies:
    async def test_two_takers_and_one_lost_reply(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await apply(acc, 1)
        await take(acc, 1, RequestId("a", 1))
        await apply(acc, 2, local_step=1)
        await take(acc, 1, RequestId("b", 1))
        again, duplicate = await take(acc, 1, RequestId("a", 1))
        assert (value_of(again), duplicate) == ([1], True)

    async def test_push_pull_whose_reply_was_lost(self, bench: Bench) -> None:
        acc = bench.accumulator()
        calls = [RequestId("a", 1), RequestId("b", 1)]
        await asyncio.gather(*(push_pull(acc, value, num_required=2, call=call) for value, call in enumerate(calls)))
        await rounds(acc, 3)
        for value, call in enumerate(calls):
            _, average, duplicate = await push_pull(acc, value, num_required=2, call=call)
            assert (value_of(average), duplicate) == ([0.5], True)

    async def test_push_pull_that_gave_up_before_its_round_ended(self, bench: Bench) -> None:
        acc = bench.accumulator()
        call = RequestId("a", 1)
        task = asyncio.create_task(push_pull(acc, 2, num_required=2, call=call))
        await turns()
        task.cancel()
        await turns()
        await apply(acc, 4)
        await take(acc, 2)
        await rounds(acc, 3)
        _, average, _ = await push_pull(acc, 2, num_required=2, call=call)
        assert value_of(average) == [3]

    async def test_take_that_gave_up_while_it_was_served(self, bench: Bench) -> None:
        acc = bench.accumulator()
        call = RequestId("a", 1)
        task = asyncio.create_task(take(acc, 1, call))
        await turns()
        await apply(acc, 7)  # the answer is there before the task that waits for it goes on
        task.cancel()
        await rounds(acc, 2)
        again, duplicate = await take(acc, 1, call)
        assert (value_of(again), duplicate) == ([7], True)


class TestHowLong:
    async def test_until_a_later_call_of_the_client(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await apply(acc, 1)
        await take(acc, 1, RequestId("a", 1))
        await rounds(acc, 1)
        assert acc.state.num_bytes == bench.memory.used == 2 * ITEM_BYTES
        await apply(acc, 1, local_step=-5, call=RequestId("a", 2))
        assert acc.state.num_bytes == bench.memory.used == ITEM_BYTES
        with pytest.raises(AbortedError, match="ended with step 1, whose average is no longer kept"):
            await take(acc, 1, RequestId("a", 1))

    async def test_not_while_a_later_call_lists_it_as_unanswered(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await apply(acc, 1)
        await take(acc, 1, RequestId("a", 1))
        await rounds(acc, 1)
        await apply(acc, 1, local_step=-5, call=RequestId("a", 9, unanswered=frozenset({1})))
        assert value_of((await take(acc, 1, RequestId("a", 1)))[0]) == [1]

    async def test_other_clients_say_nothing_about_it(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await apply(acc, 1)
        await take(acc, 1, RequestId("a", 1))
        await rounds(acc, 1)
        await apply(acc, 1, local_step=-5, call=RequestId("b", 2))
        assert value_of((await take(acc, 1, RequestId("a", 1)))[0]) == [1]

    async def test_until_every_call_it_answered_has_it(self, bench: Bench) -> None:
        acc = bench.accumulator()
        calls = [RequestId("a", 1), RequestId("b", 1)]
        await asyncio.gather(*(push_pull(acc, 1, num_required=2, call=call) for call in calls))
        await rounds(acc, 1)
        for call, num_kept in zip(calls, (2, 1), strict=True):
            await apply(acc, 1, local_step=-5, call=RequestId(call.client_id, 2))
            assert bench.memory.used == num_kept * ITEM_BYTES

    async def test_until_its_lease_ends(self) -> None:
        bench = Bench(undelivered_lease_seconds=LEASE)
        acc = bench.accumulator()
        for step, when in enumerate((0.0, 20.0)):
            bench.now = when
            await apply(acc, step, local_step=step)
            await take(acc, 1, RequestId(f"client {step}", 1))
        await rounds(acc, 1)
        for now, num_kept in ((59.0, 3), (60.0, 2), (79.0, 2), (80.0, 1)):
            bench.now = now
            bench.registry.factory.expire(Turn(100))
            assert bench.memory.used == num_kept * ITEM_BYTES, now

    async def test_until_memory_is_short(self) -> None:
        bench = Bench(limit=3 * ITEM_BYTES)
        acc = bench.accumulator()
        for step in range(2):
            await apply(acc, step, local_step=step)
            await take(acc, 1, RequestId(f"client {step}", 1))
        await apply(acc, 5, local_step=2)  # sum, newest average, oldest average: full
        assert value_of((await take(acc, 1, RequestId("client 0", 1)))[0]) == [0]
        await take(acc, 1)
        await apply(acc, 5, local_step=3)
        with pytest.raises(AbortedError, match="no longer kept"):
            await take(acc, 1, RequestId("client 0", 1))
        assert value_of((await take(acc, 1, RequestId("client 1", 1)))[0]) == [1]

    async def test_what_never_fits_is_refused(self) -> None:
        bench = Bench(limit=3 * ITEM_BYTES)
        acc = bench.accumulator()
        await apply(acc, 1)
        await take(acc, 1, RequestId("a", 1))
        with pytest.raises(ResourceExhaustedError):
            await apply(acc, 1, 2, 3, local_step=1)

    async def test_delete_gives_it_all_back(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await apply(acc, 1)
        await take(acc, 1, RequestId("a", 1))
        await rounds(acc, 2)
        bench.registry.close()
        assert bench.memory.used == 0
        bench.now = 1e6
        bench.registry.factory.expire(Turn(100))

    async def test_calls_without_an_id_keep_nothing(self, bench: Bench) -> None:
        acc = bench.accumulator()
        await asyncio.gather(*(push_pull(acc, 1, num_required=2) for _ in range(2)))
        await rounds(acc, 2)
        assert bench.memory.used == ITEM_BYTES
