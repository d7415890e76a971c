"""Bounds the payloads that are on their way to the server."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gradserve_server.tensors.senders import LOOK_SECONDS, Senders


class InFlight:
    """The bytes of payloads that are arriving, or have arrived and are not used yet. More than a limit waits.

    Waiters are served first in, first out. A payload above the limit gets its turn when nothing else is in flight.
    While there are any, senders must not be too slow. Not thread-safe: used on the event loop only.

    Attributes:
        senders: Those who send what is in flight.
    """

    def __init__(self, limit: int, least_rate: int = 0) -> None:
        """Takes the limit in bytes, and how many bytes per second senders have to send while others wait."""
        self.senders = Senders(least_rate)
        self._limit = limit
        self._used = 0
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        """The bytes in flight."""
        return self._used

    async def enter(self, num_bytes: int) -> None:
        """Waits until `num_bytes` more may be in flight."""
        if not self._waiting and self._fits(num_bytes):
            self._used += num_bytes
            return
        turn = asyncio.get_running_loop().create_future()
        entry = (num_bytes, turn)
        self._waiting.append(entry)
        if self._timer is None:
            self.senders.begin()
            self._look_later()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(num_bytes)
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(entry)
                self._serve()
            raise

    def leave(self, num_bytes: int) -> None:
        """Notes that `num_bytes` are used, or gone."""
        self._used -= num_bytes
        self._serve()

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[None]:
        """Waits until `num_bytes` more may be in flight, and counts them until the end of the block."""
        await self.enter(num_bytes)
        try:
            yield
        finally:
            self.leave(num_bytes)

    def look(self) -> None:
        """Looks at the senders while others wait; called by itself."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if any(not turn.done() for _, turn in self._waiting):
            self._look_later()  # first, so that it goes on whatever comes of this look
            self.senders.look()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self.look)

    def _fits(self, num_bytes: int) -> bool:
        return not self._used or self._used + num_bytes <= self._limit

    def _serve(self) -> None:
        while self._waiting:
            num_bytes, turn = self._waiting[0]
            if not turn.done():
                if not self._fits(num_bytes):
                    return
                self._used += num_bytes
                turn.set_result(None)
            self._waiting.popleft()
