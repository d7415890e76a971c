"""Limits on payloads that are arriving: how many bytes at once, and how fast senders must be while others wait."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar


class InFlight:
    """Bounds the bytes of payloads that are arriving or not used yet; payloads above the limit wait.

    Waiters are served first in, first out. A payload above the limit gets its turn when nothing else is in flight.
    While any wait, senders must keep to a minimum rate. Not thread-safe: used on the event loop only.

    Attributes:
        senders: The senders of the payloads in flight.
    """

    def __init__(self, limit: int, least_rate: int = 0) -> None:
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
        """Removes `num_bytes`, which were used or dropped."""
        self._used -= num_bytes
        self._serve()

    @asynccontextmanager
    async def hold(self, num_bytes: int) -> AsyncIterator[None]:
        """Waits until `num_bytes` more may be in flight, and counts them for the length of the block."""
        await self.enter(num_bytes)
        try:
            yield
        finally:
            self.leave(num_bytes)

    def look(self) -> None:
        """Checks the senders, and goes on every `LOOK_SECONDS` while others wait."""
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


T = TypeVar("T")

LOOK_SECONDS = 1.0
"""The time between two looks at senders."""
LOOKS = 10
"""The number of looks after which a sender's rate is judged."""


class TooSlowError(Exception):
    """A sender is below the minimum rate while others wait for its memory."""


@dataclass(eq=False)
class _Sender:
    num_arrived: Callable[[], int]
    patience: asyncio.Timeout
    in_messages: bool
    before: int
    num_looks: int


class Senders:
    """Minimum send rates for clients whose uploads hold scarce memory. They apply only while others wait.

    If the server itself pauses, it looks less often, and bytes that arrive in the pause count in the sender's favor.
    Used on the event loop only.
    """

    def __init__(self, least_rate: int) -> None:
        self._least_rate = least_rate
        self._senders: dict[_Sender, None] = {}

    async def receive(self, receiving: Awaitable[T], num_arrived: Callable[[], int], *, in_messages: bool = False) -> T:
        """Awaits data from a sender.

        Args:
            receiving: Receives the data.
            num_arrived: Returns a count of bytes that grows as they arrive; it need not start at 0.
            in_messages: Whether the count grows only with complete messages. The rate is then judged after each.

        Raises:
            TooSlowError: The data came too slowly.
        """
        try:
            async with asyncio.timeout(None) as patience:
                sender = _Sender(num_arrived, patience, in_messages, num_arrived(), -1)  # the first second is shorter
                self._senders[sender] = None
                try:
                    return await receiving
                finally:
                    del self._senders[sender]
        except TimeoutError:
            if not patience.expired():
                raise
            raise TooSlowError(
                f"it arrived with less than {self._least_rate} bytes per second (min_arrival_rate) while others were "
                "waiting for the room that it takes"
            ) from None

    def begin(self) -> None:
        """Starts to measure rates, as others begin to wait; earlier rates do not matter."""
        for sender in self._senders:
            sender.before, sender.num_looks = sender.num_arrived(), 0

    def look(self) -> None:
        """Ends transfers that are too slow. Called every `LOOK_SECONDS` while others wait."""
        for sender in self._senders:
            sender.num_looks += 1
            num_bytes = sender.num_arrived() - sender.before
            if sender.num_looks < LOOKS or (sender.in_messages and not num_bytes):
                continue
            if num_bytes < self._least_rate * LOOK_SECONDS * sender.num_looks:
                sender.patience.reschedule(asyncio.get_running_loop().time())
            sender.before, sender.num_looks = sender.before + num_bytes, 0
