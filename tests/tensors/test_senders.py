"""Slow senders end while others wait for their room, and only then."""

import asyncio
from contextlib import suppress

import pytest

from gradserve_server.tensors.payload import LOOKS, InFlight, TooSlowError
from tests.tensors.test_inflight import turns

RATE = 1000
LIMIT = 10


class Sender:
    """A sender that sends what a test says, and takes all of the room."""

    def __init__(self, in_flight: InFlight, *, num_bytes: int = LIMIT, in_messages: bool = False) -> None:
        self.arrived = 0
        self._in_flight = in_flight
        self._num_bytes = num_bytes
        self._in_messages = in_messages
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._receive())

    async def _receive(self) -> str:
        async with self._in_flight.hold(self._num_bytes):
            return await self._in_flight.senders.receive(
                self._all(), lambda: self.arrived, in_messages=self._in_messages
            )

    async def _all(self) -> str:
        await self._end.wait()
        return "all"

    async def finish(self) -> str:
        self._end.set()
        return await self.task


class Waiter:
    """Somebody who waits for the room."""

    def __init__(self, in_flight: InFlight, num_bytes: int = LIMIT) -> None:
        self._in_flight = in_flight
        self._num_bytes = num_bytes
        self.task = asyncio.create_task(in_flight.enter(num_bytes))

    async def leave(self) -> None:
        if self.task.done():
            self._in_flight.leave(self._num_bytes)
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


async def look(in_flight: InFlight, *senders: Sender, rate: float = 0, times: int = 1) -> None:
    """Lets seconds pass, in each of which senders send so much."""
    for _ in range(times):
        for each in senders:
            each.arrived += int(rate)
        in_flight.look()
        await turns()


@pytest.fixture
async def in_flight() -> InFlight:
    return InFlight(LIMIT, RATE)


async def test_alone_a_sender_may_take_its_time(in_flight: InFlight) -> None:
    sender = Sender(in_flight)
    await turns()
    await look(in_flight, times=10 * LOOKS)
    assert await sender.finish() == "all"
    assert in_flight.used == 0


@pytest.mark.parametrize("rate", [0, 1, RATE - 1])
async def test_a_slow_one_ends_when_others_wait(in_flight: InFlight, rate: int) -> None:
    sender = Sender(in_flight)
    await turns()
    waiter = Waiter(in_flight)
    await turns()
    await look(in_flight, sender, rate=rate, times=LOOKS - 1)
    assert not sender.task.done()
    await look(in_flight, sender, rate=rate)
    with pytest.raises(TooSlowError, match=r"less than 1000 bytes per second \(min_arrival_rate\)"):
        await sender.task
    await waiter.task
    assert in_flight.used == LIMIT
    await waiter.leave()


async def test_one_that_is_fast_enough_goes_on(in_flight: InFlight) -> None:
    sender = Sender(in_flight)
    await turns()
    waiter = Waiter(in_flight)
    await turns()
    await look(in_flight, sender, rate=RATE, times=3 * LOOKS)
    sender.arrived += LOOKS * RATE  # then it has a pause
    await look(in_flight, times=LOOKS)
    assert await sender.finish() == "all"
    await waiter.task
    await waiter.leave()


async def test_it_ends_when_it_becomes_slow(in_flight: InFlight) -> None:
    sender = Sender(in_flight)
    await turns()
    waiter = Waiter(in_flight)
    await turns()
    await look(in_flight, sender, rate=RATE, times=LOOKS)
    await look(in_flight, sender, rate=1, times=LOOKS)
    with pytest.raises(TooSlowError):
        await sender.task
    await waiter.leave()


async def test_how_fast_it_was_alone_does_not_matter(in_flight: InFlight) -> None:
    sender = Sender(in_flight)
    await turns()
    for _ in range(5):
        waiter = Waiter(in_flight)
        await turns()
        await look(in_flight, times=LOOKS - 1)
        await waiter.leave()
        await look(in_flight)
    sender.arrived += 1_000_000
    waiter = Waiter(in_flight)
    await turns()
    await look(in_flight, times=LOOKS)
    with pytest.raises(TooSlowError):
        await sender.task
    await waiter.leave()


async def test_all_slow_ones_end_and_only_those() -> None:
    in_flight = InFlight(3 * LIMIT, RATE)
    slow, fast, slow_too = (Sender(in_flight) for _ in range(3))
    await turns()
    waiter = Waiter(in_flight)
    await turns()
    for _ in range(LOOKS):
        await look(in_flight, fast, rate=RATE)
    for each in (slow, slow_too):
        with pytest.raises(TooSlowError):
            await each.task
    assert await fast.finish() == "all"
    await waiter.leave()


async def test_whoever_comes_later_has_as_much_time() -> None:
    in_flight = InFlight(3 * LIMIT, RATE)
    first = Sender(in_flight, num_bytes=2 * LIMIT)
    await turns()
    waiter = Waiter(in_flight, 2 * LIMIT)
    await turns()
    await look(in_flight, first, rate=RATE, times=LOOKS - 1)
    later = asyncio.create_task(in_flight.senders.receive(asyncio.sleep(3600), lambda: 0))
    await turns()
    await look(in_flight, first, rate=RATE, times=LOOKS)
    assert not later.done()
    await look(in_flight, first, rate=RATE)
    with pytest.raises(TooSlowError):
        await later
    assert await first.finish() == "all"
    await waiter.leave()


async def test_a_long_message_has_the_time_that_it_takes(in_flight: InFlight) -> None:
    sender = Sender(in_flight, in_messages=True)
    await turns()
    waiter = Waiter(in_flight)
    await turns()
    await look(in_flight, times=3 * LOOKS)
    sender.arrived += 3 * LOOKS * RATE + RATE
    await look(in_flight)
    assert not sender.task.done()
    await look(in_flight, times=3 * LOOKS)
    sender.arrived += 1
    await look(in_flight)
    with pytest.raises(TooSlowError):
        await sender.task
    await waiter.leave()


async def test_errors_of_the_receiver_are_its_own(in_flight: InFlight) -> None:
    async def broken() -> None:
        raise TimeoutError("the connection is gone")

    with pytest.raises(TimeoutError, match="the connection is gone"):
        await in_flight.senders.receive(broken(), lambda: 0)
    waiting = asyncio.create_task(in_flight.senders.receive(asyncio.sleep(3600), lambda: 0))
    await turns()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
