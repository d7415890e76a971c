"""Payloads wait for their turn."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gradserve_server.tensors import payload
from gradserve_server.tensors.payload import InFlight


async def turns() -> None:
    """Lets everything run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


class Waiting:
    """Payloads that wait, are in flight, or were given up."""

    def __init__(self, limit: int) -> None:
        self.in_flight = InFlight(limit)
        self.entered: list[str] = []

    def start(self, name: str, num_bytes: int) -> asyncio.Task[None]:
        async def enter() -> None:
            await self.in_flight.enter(num_bytes)
            self.entered.append(name)

        return asyncio.create_task(enter())


async def test_first_come_first_served() -> None:
    waiting = Waiting(10)
    tasks = [waiting.start(name, size) for name, size in (("a", 8), ("b", 5), ("c", 1), ("d", 5))]
    await turns()
    assert waiting.entered == ["a"], "c would fit but came later than b"
    waiting.in_flight.leave(8)
    await turns()
    assert waiting.entered == ["a", "b", "c"]
    waiting.in_flight.leave(5)
    await asyncio.gather(*tasks)
    assert (waiting.entered, waiting.in_flight.used) == (["a", "b", "c", "d"], 6)


async def test_what_is_larger_than_the_limit_goes_alone() -> None:
    waiting = Waiting(10)
    tasks = [waiting.start(name, size) for name, size in (("a", 1), ("large", 100), ("b", 1))]
    await turns()
    assert waiting.entered == ["a"]
    waiting.in_flight.leave(1)
    await turns()
    assert waiting.entered == ["a", "large"]
    waiting.in_flight.leave(100)
    await asyncio.gather(*tasks)
    assert waiting.in_flight.used == 1


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_one_who_gives_up_lets_the_next_pass() -> None:
    waiting = Waiting(10)
    tasks = [waiting.start(name, size) for name, size in (("a", 8), ("b", 5), ("c", 2))]
    await turns()
    await cancelled(tasks[1])
    await asyncio.gather(tasks[0], tasks[2])
    assert (waiting.entered, waiting.in_flight.used) == (["a", "c"], 10)


async def test_one_who_gives_up_when_it_is_its_turn_takes_nothing() -> None:
    waiting = Waiting(10)
    tasks = [waiting.start(name, size) for name, size in (("a", 8), ("b", 5), ("c", 7))]
    await turns()
    waiting.in_flight.leave(8)
    await cancelled(tasks[1])
    await asyncio.gather(tasks[0], tasks[2])
    assert (waiting.entered, waiting.in_flight.used) == (["a", "c"], 7)


async def test_a_block_ends_what_it_began() -> None:
    in_flight = InFlight(10)
    async with in_flight.hold(4):
        assert in_flight.used == 4
    assert in_flight.used == 0


@pytest.mark.parametrize("num_tensors", [1, 3])
async def test_a_place_that_outlasts_its_block_ends_with_the_last_tensor(num_tensors: int) -> None:
    in_flight = InFlight(10)
    async with in_flight.hold(4) as place:
        freed = place.outlast(num_tensors)
    for _ in range(num_tensors):
        assert in_flight.used == 4
        freed()
    assert in_flight.used == 0


async def test_a_place_does_not_outlast_an_error() -> None:
    in_flight = InFlight(10)
    freed: list[Callable[[], None]] = []

    async def fail() -> None:
        async with in_flight.hold(4) as place:
            freed.append(place.outlast(1))
            raise InterruptedError

    with pytest.raises(InterruptedError):
        await fail()
    assert in_flight.used == 0
    freed[0]()
    assert in_flight.used == 0


@pytest.mark.parametrize("is_freed_in_block", [True, False])
async def test_a_place_is_left_once(is_freed_in_block: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "USE_SECONDS", 0.0)
    in_flight = InFlight(10)
    async with in_flight.hold(4) as place:
        freed = place.outlast(1)
        if is_freed_in_block:
            freed()
    await turns()
    assert in_flight.used == 0
    if not is_freed_in_block:
        freed()
    assert in_flight.used == 0, "its time is over, whatever comes later"


class Machine(RuleBasedStateMachine):
    """Any order of entering, leaving and giving up; compared with a list."""

    LIMIT = 10
    payloads = Bundle("payloads")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.in_flight = InFlight(self.LIMIT)
        self.inside: dict[int, int] = {}
        self.queue: list[tuple[int, int]] = []
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def run(self, *, cancel: asyncio.Task[None] | None = None) -> None:
        async def settle() -> None:
            if cancel is not None:
                await cancelled(cancel)
            await turns()

        self.runner.run(settle())
        self.admit()

    def admit(self) -> None:
        while self.queue:
            name, size = self.queue[0]
            used = sum(self.inside.values())
            if used and used + size > self.LIMIT:
                return
            self.inside[name] = size
            self.queue.pop(0)

    @rule(target=payloads, size=st.integers(0, 15))
    def enter(self, size: int) -> int:
        name = len(self.tasks)

        async def start() -> asyncio.Task[None]:
            return asyncio.create_task(self.in_flight.enter(size))

        self.tasks[name] = self.runner.run(start())
        self.queue.append((name, size))
        self.run()
        return name

    @rule(name=consumes(payloads))
    def end(self, name: int) -> None:
        if name in self.inside:
            self.in_flight.leave(self.inside.pop(name))
            self.run()
            return
        self.queue = [each for each in self.queue if each[0] != name]
        self.run(cancel=self.tasks[name])

    @invariant()
    def agrees(self) -> None:
        assert self.in_flight.used == sum(self.inside.values())
        assert {name for name, task in self.tasks.items() if not task.done()} == {name for name, _ in self.queue}

    def teardown(self) -> None:
        self.runner.close()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
