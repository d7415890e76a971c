"""Values that the server's event loop makes for the thread of the HTTP port."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

EVERY_SECONDS = 1.0
"""How old a value may be; younger ones serve everybody."""
REST = 20.0
"""How many times as long as it took to make a value, at least, none is made after it."""

T = TypeVar("T")


class Latest(Generic[T]):
    """The latest value of one kind. However many ask, the server's event loop makes one at a time, at a bounded rate.

    Used on the event loop of the HTTP port only.
    """

    def __init__(
        self,
        make: Callable[[], Coroutine[Any, Any, T]],
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes what makes a value that never changes, and the server's event loop."""
        self._make = make
        self._loop = loop
        self._clock = clock
        self._making: asyncio.Task[T] | None = None
        self._valid_until = 0.0

    async def get(self) -> T:
        """Returns the latest value; makes one if there is none or it is too old."""
        making = self._making
        if making is None or (making.done() and self._clock() >= self._valid_until):
            making = self._making = asyncio.create_task(self._made())
        return await asyncio.shield(making)

    async def close(self) -> None:
        """Ends what is under way."""
        if self._making is not None:
            self._making.cancel()
            await asyncio.gather(self._making, return_exceptions=True)

    async def _made(self) -> T:
        began = self._clock()
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._make(), self._loop))
        finally:
            # The busier the server, the longer this took, and the longer it is left alone.
            now = self._clock()
            self._valid_until = now + max(EVERY_SECONDS, REST * (now - began))
