"""How much of some memory has arrived."""

import asyncio
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Arrival:
    """Memory that is filled from its beginning to its end, by any thread.

    Awaited on the event loop, by one task at a time.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        """Takes the memory, of which nothing has arrived yet."""
        self._loop = asyncio.get_running_loop()
        self._start = _address(memory)
        self._size = memory.size
        self._num_arrived = 0
        self._num_wanted = memory.size + 1
        self._waiter: asyncio.Future[None] | None = None

    def advance(self, num_bytes: int) -> None:
        """Notes that more bytes have arrived. Called by the thread that received them."""
        self._num_arrived += num_bytes
        if self._num_arrived >= self._num_wanted:
            self._num_wanted = self._size + 1
            self._loop.call_soon_threadsafe(self._wake)

    async def of(self, part: NDArray[Any]) -> None:
        """Waits until an array in the memory has arrived."""
        await self._reach(_address(part) - self._start + part.nbytes)

    async def of_all(self) -> None:
        """Waits until everything has arrived."""
        await self._reach(self._size)

    async def _reach(self, num_bytes: int) -> None:
        while self._num_arrived < num_bytes:
            self._waiter = self._loop.create_future()
            self._num_wanted = num_bytes
            if self._num_arrived >= num_bytes:  # meanwhile, and `advance` may not have seen that somebody waits
                return
            try:
                await self._waiter
            finally:
                self._waiter = None  # if it was cancelled, it has the error, whose traceback has this frame

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
