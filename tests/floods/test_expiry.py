"""Leases of much: their end costs what ends, a little in each turn of the event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from gradserve_server.accumulators.accumulator import Accumulator
from gradserve_server.accumulators.gradient import Contribution, Gradient
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.layers.batch_norm.forwards import Expiries, Forward, ForwardOutcome
from gradserve_server.resources.budget import Budget, Reservation
from gradserve_server.resources.lifetimes import LeaseQueue, Lifetime
from gradserve_server.resources.memory import Room
from gradserve_server.resources.registry import ResourceKey
from gradserve_server.runtime.event_loop import Turn
from tests.accumulators.bench import Bench, apply, opened, push_pull, turns
from tests.floods.test_lists import store_of
from tests.floods.work import calls_of

LOOKS = 256
MOST_CALLS = 40 * LOOKS
"""The most calls of a turn."""


def all_turns(expire: Callable[[Turn], int]) -> list[int]:
    """Returns what each turn deleted until nothing was left."""
    deleted = []
    while True:
        turn = Turn(LOOKS)
        assert calls_of(lambda turn=turn: deleted.append(expire(turn))) < MOST_CALLS  # type: ignore[misc]
        if not turn.is_over:
            return deleted


def test_tensors_whose_leases_end_together() -> None:
    store = store_of(3000)
    store._queue._clock = store._clock = lambda: 1e9
    assert sum(all_turns(store.expire)) == 3000
    assert len(store) == 0


def test_leases_that_were_renewed_are_looked_at_a_few_at_a_time() -> None:
    now = 0.0
    queue: LeaseQueue[int] = LeaseQueue(lambda: now)
    leases = [queue.begin(number, 10.0) for number in range(3000)]
    now = 9.0
    for lease in leases:
        lease.renew()
    now = 11.0

    def expire(turn: Turn) -> int:
        count = 0
        while queue.pop(turn) is not None:
            count += 1
        return count

    assert sum(all_turns(expire)) == 0
    now = 19.0
    assert sum(all_turns(expire)) == 3000


@pytest.mark.parametrize("owner", ["", "somebody"])
def test_accumulators_whose_leases_end_together(bench: Bench, owner: str) -> None:
    for number in range(1000):
        lifetime = Lifetime(owner, None if owner else 5.0)
        bench.accumulator(key=ResourceKey("c", str(number)), lifetime=lifetime)
    bench.now = 1000.0
    deleted = []
    while True:
        turn = Turn(LOOKS)
        deleted.append(bench.lifetimes.expire(turn))
        if not turn.is_over:
            break
    assert sum(deleted) == 1000
    assert max(deleted) <= LOOKS


async def test_averages_kept_for_calls_that_do_not_come_again(bench: Bench) -> None:
    acc = bench.accumulator(keep_averages=1)
    calls = [
        asyncio.create_task(push_pull(acc, 1, num_required=1000, call=RequestId(f"client {number}", 1)))
        for number in range(999)
    ]
    await turns()
    await push_pull(acc, 1, num_required=1000, call=RequestId("the last", 1))
    await asyncio.gather(*calls)
    bench.now = 1e6
    assert sum(all_turns(bench.registry.factory.expire)) == 1000


def forwards_of(count: int, expires: float) -> list[Forward]:
    budget = Budget(1 << 40, "bytes")
    return [
        Forward(str(number), ForwardOutcome(), Room(Reservation(budget)), Reservation(budget), expires=expires)
        for number in range(count)
    ]


def expiring(forwards: list[Forward]) -> Expiries:
    expiries = Expiries()
    for forward in forwards:
        expiries.add(forward)
    return expiries


class TestForwards:
    def test_those_that_do_not_expire_cost_nothing(self) -> None:
        few, many = expiring(forwards_of(10, 5.0)), expiring(forwards_of(10_000, 5.0))
        assert calls_of(lambda: many.expired(4.9)) == calls_of(lambda: few.expired(4.9))

    def test_some_of_many_expire_at_a_time(self) -> None:
        expiries = expiring(forwards_of(10_000, 5.0))
        sizes = []
        while expired := expiries.expired(5.0):
            sizes.append(len(expired))
            for forward in expired:
                expiries.remove(forward)
        assert sum(sizes) == 10_000
        assert max(sizes) < 5000

    def test_they_stay_until_they_are_removed(self) -> None:
        forwards = forwards_of(3, 5.0)
        expiries = expiring(forwards)
        assert expiries.expired(5.0) == expiries.expired(6.0) == forwards
        forwards[1].expires = 9.0  # it was used
        assert expiries.expired(7.0) == [forwards[0], forwards[2]]
        assert expiries.expired(9.0) == [forwards[0], forwards[2], forwards[1]]

    def test_one_in_use_waits(self) -> None:
        (forward,) = forwards = forwards_of(1, 5.0)
        expiries = expiring(forwards)
        forward.users = 1
        assert expiries.expired(6.0) == []
        forward.users = 0
        assert expiries.expired(6.0) == [forward]

    def test_one_that_expires_earlier_than_before(self) -> None:
        (forward,) = forwards = forwards_of(1, 50.0)
        expiries = expiring(forwards)
        for forward.expires in (40.0, 60.0, 10.0):
            expiries.add(forward)
        assert expiries.expired(9.0) == []
        assert expiries.expired(10.0) == [forward]
        expiries.remove(forward)
        assert expiries.expired(100.0) == []

    def test_removed_ones_leave_nothing(self) -> None:
        expiries = Expiries()
        for _ in range(100):
            for forward in forwards_of(10, 1e9):
                expiries.add(forward)
                expiries.remove(forward)
        assert len(expiries._heap) < 100


def run_at_once(work: Coroutine[Any, Any, object]) -> None:
    """Runs work that never waits."""
    with pytest.raises(StopIteration):
        work.send(None)


async def round_of(acc: Accumulator) -> None:
    await apply(acc, 1, local_step=1 << 40)
    await acc.take(None, 1, None)


class TestTotals:
    """What accumulators hold is not added up again at each call."""

    async def test_kept_averages(self, bench: Bench) -> None:
        acc = bench.accumulator(keep_averages=1000)
        costs = [calls_of(lambda: run_at_once(round_of(acc))) for _ in range(500)]
        assert costs[499] == costs[2]
        assert acc.state.num_bytes == 500 * 4

    async def test_gradients_held_for_their_order(self, bench: Bench) -> None:
        acc = bench.accumulator(deterministic=True)
        costs = []
        for number in range(500):
            held = Gradient({"": np.ones(2, np.float32)})
            applying = acc.apply(None, Contribution(worker_id=f"w{number}"), opened(held))
            costs.append(calls_of(lambda applying=applying: run_at_once(applying)))  # type: ignore[misc]
        assert costs[499] == costs[1]
        assert acc.state.num_bytes == 500 * 8
