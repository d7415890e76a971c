"""Ends what has a lease that has ended, from time to time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from gradserve_server.leases.service_clock import ServiceClock
from gradserve_server.leases.turn import Turn

_log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 1.0
_ENDED_AT_ONCE = 256
"""Leases looked at before other work gets its turn."""


class Expiry:
    """Ends what has expired, a few things at a time, and lets the clock of leases know that the server is awake."""

    def __init__(
        self,
        clock: ServiceClock,
        in_turns: Mapping[str, Callable[[Turn], int]],
        as_a_whole: Mapping[str, Callable[[], Awaitable[int]]],
        interval: float = _INTERVAL_SECONDS,
    ) -> None:
        """Takes the clock, and what expires.

        Args:
            clock: The clock of leases.
            in_turns: What ends things in one turn and returns their number, by the name of the things.
            as_a_whole: What ends all that has expired, and gives others their turn itself.
            interval: Seconds from one time to the next.
        """
        self._clock = clock
        self._in_turns = in_turns
        self._as_a_whole = as_a_whole
        self._interval = interval

    async def run(self) -> None:
        """Goes on until it is cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            self._clock.tick()
            await self._expire()

    async def _expire(self) -> None:
        """Ends all that has expired.

        Raises:
            ExceptionGroup: Some of it could not be ended; everything else is.
        """
        everything = {what: partial(_expire_all, expire) for what, expire in self._in_turns.items()}
        failures = []
        for what, expire_all in (everything | dict(self._as_a_whole)).items():
            try:
                _report(what, await expire_all())
            except Exception as error:
                failures.append(error)
        if failures:
            raise ExceptionGroup("not everything that has expired could be ended", failures)


def _report(what: str, count: int) -> None:
    if count:
        _log.info("%d %s expired", count, what)


async def _expire_all(expire: Callable[[Turn], int]) -> int:
    """Deletes everything that has expired, a few at a time; returns how much it was."""
    ended = 0
    while True:
        turn = Turn(_ENDED_AT_ONCE)
        ended += expire(turn)
        if not turn.is_over:
            return ended
        await asyncio.sleep(0)
