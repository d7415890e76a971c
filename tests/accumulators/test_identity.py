"""Every call counts once."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gradserve_server.accumulators.gradient import Contribution, Gradient
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.accumulators.spec import (
    ComponentSpec,
    PartialShape,
)
from gradserve_server.errors import (
    AbortedError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from tests.accumulators.bench import (
    F32,
    ID,
    Bench,
    HeldCompute,
    Left,
    apply,
    gradient,
    push_pull,
    take,
    turns,
    value_of,
)


class TestExactlyOnce:
    async def test_second_apply_gets_the_first_answer(self, bench: Bench) -> None:
        acc = bench.accumulator()
        first, duplicate = await apply(acc, 1, call=ID)
        again, duplicate_again = await apply(acc, 1, call=ID)
        assert (duplicate, duplicate_again) == (False, True)
        assert again is first
        assert acc.num_accumulated == 1

    async def test_a_call_comes_again_right_when_its_first_caller_has_left(self, bench: Bench) -> None:
        acc, left = bench.accumulator(), Left()
        first = asyncio.create_task(acc.apply(ID, Contribution(), left))
        await left.is_opened.wait()
        await turns()
        left.may_go_on.set()
        # Its first step comes when the task of the other has ended, and before anybody has been told.
        second = asyncio.create_task(apply(acc, 1, call=ID))
        with pytest.raises(AbortedError, match="has left"):
            await first
        _, duplicate = await second
        assert not duplicate
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
        # Its own was abandoned, and it must not get the one that the step has now.
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

    async def test_a_client_that_waits_is_not_silent(self) -> None:
        bench = Bench(client_memory_seconds=10)
        acc = bench.accumulator()
        first = asyncio.create_task(push_pull(acc, 1, num_required=3, call=ID))
        await turns()
        bench.now = 11
        await apply(acc, 3, call=RequestId("b", 1))
        second = asyncio.create_task(push_pull(acc, 1, num_required=3, call=ID))
        await turns()
        assert acc.num_accumulated == 2
        await apply(acc, 5, call=RequestId("b", 2))
        assert [(value_of(average), duplicate) for _, average, duplicate in (await first, await second)] == [
            ([3], False),
            ([3], True),
        ]

    async def test_a_client_that_has_waited_for_long_was_heard_of(self) -> None:
        bench = Bench(max_clients=2, client_memory_seconds=10)
        acc = bench.accumulator()
        waiting = asyncio.create_task(push_pull(acc, 1, num_required=2, call=RequestId("a", 1)))
        await turns()
        bench.now = 11
        await apply(acc, 1, call=RequestId("b", 1))
        await waiting
        bench.now = 20
        with pytest.raises(ResourceExhaustedError, match="too many clients"):
            await apply(acc, 1, local_step=1, call=RequestId("c", 1))

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


class TestSameTurn:
    """A call that is cancelled and sent again before the event loop has cleaned up after the first."""

    @pytest.mark.parametrize("turns_between", range(6))
    async def test_cancelled_take_sent_again(self, bench: Bench, turns_between: int) -> None:
        acc = bench.accumulator(keep_averages=8)
        first = asyncio.create_task(take(acc, 1, ID))
        await turns()
        first.cancel()
        await turns(turns_between)
        second = asyncio.create_task(take(acc, 1, ID))
        await turns()
        await apply(acc, 5)
        assert value_of((await second)[0]) == [5]
        # The reply to the second was lost as well, and other rounds have gone by.
        await apply(acc, 6, local_step=1)
        await take(acc, 1)
        again, duplicate = await take(acc, 1, ID)
        assert (value_of(again), duplicate) == ([5], True)
        assert acc.state.global_step == 2

    async def test_a_repeated_call_whose_server_stops_may_be_made_again(self, bench: Bench) -> None:
        acc, may_open = bench.accumulator(), asyncio.Event()

        async def open_and_stop(use: Callable[[Gradient], Awaitable[Any]]) -> Any:
            await may_open.wait()
            added = await gradient(1)(use)
            stopped = UnavailableError("the server is shutting down")
            asyncio.get_running_loop().call_soon(acc.close, stopped)  # before the repeated call goes on
            return added

        first = asyncio.create_task(acc.push_pull(ID, Contribution(), open_and_stop, 1, None))
        second = asyncio.create_task(push_pull(acc, 1, num_required=1, call=ID))
        await turns()
        may_open.set()
        assert value_of((await first)[1]) == [1]
        with pytest.raises(UnavailableError):
            await second

    @pytest.mark.parametrize("turns_between", range(6))
    async def test_failed_apply_sent_again(self, bench: Bench, turns_between: int) -> None:
        acc = bench.accumulator(ComponentSpec("", F32, PartialShape((1,))))
        wrong = asyncio.create_task(apply(acc, 1, 2, call=ID))
        await turns(turns_between)
        with contextlib.suppress(InvalidArgumentError):  # it may join the first, and fail with it
            await apply(acc, 1, call=ID)
        with contextlib.suppress(InvalidArgumentError):
            await wrong
        await turns()
        for _ in range(2):
            await apply(acc, 1, call=ID)
        assert acc.num_accumulated == 1

    @pytest.mark.parametrize("turns_between", range(6))
    async def test_cancelled_push_pull_sent_again(self, bench: Bench, turns_between: int) -> None:
        acc = bench.accumulator(keep_averages=8)
        first = asyncio.create_task(push_pull(acc, 1, num_required=2, call=ID))
        await turns(turns_between)
        first.cancel()
        await turns(turns_between)
        second = asyncio.create_task(push_pull(acc, 1, num_required=2, call=ID))
        await turns()
        assert acc.num_accumulated == 1
        await apply(acc, 3)
        assert value_of((await second)[1]) == [2]
        await apply(acc, 6, local_step=1)
        await take(acc, 1)
        _, again, duplicate = await push_pull(acc, 1, num_required=2, call=ID)
        assert (value_of(again), duplicate) == ([2], True)


@pytest.mark.parametrize(
    ("since", "acknowledged"), [(None, {0, 1, 2, 4}), (2, {0, 1}), (4, {0, 1, 2}), (0, set()), (9, {0, 1, 2, 4})]
)
def test_what_a_call_acknowledges(since: int | None, acknowledged: set[int]) -> None:
    call = RequestId("a", 5, unanswered=frozenset({3}), unanswered_since=since)
    assert {number for number in range(8) if call.acknowledges(number)} == acknowledged
