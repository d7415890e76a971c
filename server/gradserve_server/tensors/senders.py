"""Those who send what takes a limited room, and how slowly they may do so while others wait for it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

LOOK_SECONDS = 1.0
"""The time between two looks at senders."""
LOOKS = 10
"""After so many looks it is decided whether a sender is too slow."""


class TooSlowError(Exception):
    """A sender is slower than the least rate, while others wait for its room."""


@dataclass(eq=False)
class _Sender:
    num_arrived: Callable[[], int]
    patience: asyncio.Timeout
    in_messages: bool
    before: int
    num_looks: int


class Senders:
    """Ends what arrives too slowly while others wait. Nobody else has to hurry.

    What arrives during a pause of the server itself, which then looks less often, counts in favour of the sender.
    Used on the event loop only.
    """

    def __init__(self, least_rate: int) -> None:
        """Takes the bytes per second that have to arrive while others wait."""
        self._least_rate = least_rate
        self._senders: dict[_Sender, None] = {}

    async def receive(self, receiving: Awaitable[T], num_arrived: Callable[[], int], *, in_messages: bool = False) -> T:
        """Awaits what a sender sends.

        Args:
            receiving: Receives it.
            num_arrived: Returns how many bytes have arrived, from whatever number on.
            in_messages: Whether these are counted when a message is complete only. Then it is decided when one is.

        Raises:
            TooSlowError: It came too slowly.
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
        """Notes that others begin to wait. How fast it was before does not matter."""
        for sender in self._senders:
            sender.before, sender.num_looks = sender.num_arrived(), 0

    def look(self) -> None:
        """Ends what is too slow. Called every `LOOK_SECONDS` while others wait."""
        for sender in self._senders:
            sender.num_looks += 1
            num_bytes = sender.num_arrived() - sender.before
            if sender.num_looks < LOOKS or (sender.in_messages and not num_bytes):
                continue
            if num_bytes < self._least_rate * LOOK_SECONDS * sender.num_looks:
                sender.patience.reschedule(asyncio.get_running_loop().time())
            sender.before, sender.num_looks = sender.before + num_bytes, 0
