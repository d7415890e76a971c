"""Leases in the order of their ends, and how little the others cost."""

import random
from contextlib import suppress
from functools import partial

import pytest

from gradserve_server.resources.lifetimes import Lease, LeaseQueue
from gradserve_server.runtime.event_loop import Turn
from tests.floods.work import calls_of


class World:
    """A queue and its clock, which counts how often it is looked at."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.queue: LeaseQueue[str] = LeaseQueue(lambda: self.now)

    def begin(self, seconds: float) -> Lease[str]:
        return self.queue.begin("what ends", seconds)

    def ended(self) -> list[Lease[str]]:
        found = []
        while (lease := self.queue.pop(Turn(1000))) is not None:
            found.append(lease)
        return found

    def after(self, seconds: float) -> list[Lease[str]]:
        self.now += seconds
        return self.ended()


@pytest.fixture
def world() -> World:
    return World()


def test_they_end_in_the_order_of_their_ends(world: World) -> None:
    long, short, middle = world.begin(30), world.begin(10), world.begin(20)
    assert world.after(9.9) == []
    assert world.after(0.1) == [short]
    assert world.after(100) == [middle, long]
    assert len(world.queue) == 0


def test_a_renewed_lease_begins_anew(world: World) -> None:
    lease = world.begin(10)
    for _ in range(5):
        assert world.after(9) == []
        lease.renew()
    assert world.after(9.9) == []
    assert world.after(0.1) == [lease]


def test_a_lease_in_use_does_not_end_and_begins_anew_with_the_end_of_the_use(world: World) -> None:
    lease = world.begin(10)
    with lease.use():
        assert world.after(1000) == []
        with lease.use():
            assert world.after(1000) == []
        assert world.after(1000) == []
    assert world.after(9.9) == []
    assert world.after(0.1) == [lease]


def test_a_use_that_fails_is_one(world: World) -> None:
    lease = world.begin(10)
    with suppress(KeyError), lease.use():
        world.now += 50
        raise KeyError
    assert world.after(9.9) == []
    assert world.after(0.1) == [lease]


def test_a_cancelled_lease_never_ends(world: World) -> None:
    lease, other = world.begin(10), world.begin(10)
    world.queue.cancel(lease)
    world.queue.cancel(lease)
    assert world.after(100) == [other]


def test_those_that_ended_early_leave_nothing(world: World) -> None:
    kept = world.begin(1e6)
    for _ in range(10_000):
        world.queue.cancel(world.begin(1e6))
    assert len(world.queue._heap) < 100
    assert world.after(1e6) == [kept]


def test_others_cost_nothing(world: World) -> None:
    """A look takes the time of those that end, and each other lease is looked at once in its length."""
    looks = 0

    class Counted(Lease[str]):
        def end(self, now: float) -> float:
            nonlocal looks
            looks += 1
            return super().end(now)

    leases = [Counted("what ends", 60, lambda: world.now) for _ in range(1000)]
    for lease in leases:
        world.queue._push(lease, world.now)
    looks = 0
    for _second in range(59):
        for lease in leases:
            lease.renew()
        assert world.after(1) == []
    assert looks == 0
    for _second in range(60):
        for lease in leases:
            lease.renew()
        assert world.after(1) == []
    assert looks <= 4 * len(leases)


def test_beside_a_simple_model() -> None:
    """Any order of beginning, use, cancelling and time."""
    draw = random.Random(0)
    for _ in range(50):
        world = World()
        ends: dict[Lease[str], float] = {}
        for _ in range(200):
            action = draw.random()
            if action < 0.3 or not ends:
                seconds = draw.uniform(0.1, 20)
                ends[world.begin(seconds)] = world.now + seconds
            elif action < 0.5:
                lease = draw.choice(list(ends))
                lease.renew()
                ends[lease] = world.now + lease.seconds
            elif action < 0.6:
                lease = draw.choice(list(ends))
                world.queue.cancel(lease)
                del ends[lease]
            else:
                world.now += draw.uniform(0, 3)
                due = {lease for lease, end in ends.items() if end <= world.now}
                assert set(world.ended()) == due
                ends = {lease: end for lease, end in ends.items() if lease not in due}
        assert len(world.queue) == len(ends)


def test_to_cancel_one_costs_little_however_many_there_are(world: World) -> None:
    leases = [world.begin(10 + number % 7) for number in range(20_000)]
    kept = leases[::1000]
    for lease in set(leases).difference(kept):
        assert calls_of(partial(world.queue.cancel, lease)) < 60
    assert len(world.queue) == len(kept)
    assert len(world.queue._heap) + len(world.queue._old) < 200
    assert world.after(9.9) == []
    assert sorted(map(id, world.after(100))) == sorted(map(id, kept))


def test_they_end_in_order_while_others_are_cancelled(world: World) -> None:
    leases = [world.begin(1 + number) for number in range(1000)]
    for lease in leases[::-1]:
        if lease.seconds % 10:
            world.queue.cancel(lease)
            assert world.ended() == []
    assert [lease.seconds for lease in world.after(10_000)] == list(range(10, 1001, 10))
