"""Memory that is filled by another thread."""

import asyncio
import threading

import numpy as np

from gradserve_server.tensors.payload import Arrival
from tests.servers.polling import PATIENCE_SECONDS

MEMORY = np.zeros(100, np.uint8)


async def test_what_has_arrived_is_not_waited_for() -> None:
    arrival = Arrival(MEMORY)
    await arrival.of(MEMORY[:0])
    arrival.advance(60)
    await arrival.of(MEMORY[10:60])
    arrival.advance(40)
    await arrival.of_all()


async def test_a_part_is_waited_for_until_its_end_is_there() -> None:
    arrival = Arrival(MEMORY)
    task = asyncio.create_task(arrival.of(MEMORY[10:60].view(np.uint16)))
    for size in (30, 29):
        arrival.advance(size)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
    arrival.advance(1)
    await task


async def test_one_that_is_given_up_leaves_nothing() -> None:
    arrival = Arrival(MEMORY)
    task = asyncio.create_task(arrival.of(MEMORY[:60]))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    arrival.advance(100)
    await arrival.of_all()


async def test_no_byte_is_missed_however_threads_meet() -> None:
    for _ in range(200):
        arrival = Arrival(MEMORY)
        thread = threading.Thread(target=lambda arrival=arrival: [arrival.advance(1) for _ in range(100)])
        thread.start()
        async with asyncio.timeout(PATIENCE_SECONDS):
            for end in range(1, 101):
                await arrival.of(MEMORY[:end])
        thread.join()
