"""A network between clients and a server: late, out of order, twice, in one direction only, or not at all."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_DELAYS = [0.0, 0.0, 0.001, 0.02, 0.3]
_LOSS = 0.04
"""How likely a message is lost, in each direction."""
_SECOND_COPY = 0.1
"""How likely a request arrives twice: its connection broke, and it was sent again over another one."""
_SILENCE = 0.3
"""How likely the server is not told at once that a caller has gone away: its end of the connection seems well."""
_KEEPALIVE = 3.0
"""Seconds after which it finds out."""


class LostError(Exception):
    """No answer came in time."""


class Network:
    """Carries requests to the server, and answers back.

    Attributes:
        num_serving: How many requests the server is working on; one that only holds a lease is none.
    """

    def __init__(
        self,
        chance: random.Random,
        on_fault: Callable[[str], object],
        on_error: Callable[[BaseException], object],
    ) -> None:
        """Takes what is told of each fault, and of the errors of calls whose callers no longer listen."""
        self._chance = chance
        self._on_fault = on_fault
        self._on_error = on_error
        self._cut_off: set[str] = set()
        self._running: set[asyncio.Task[None]] = set()
        self.num_serving = 0

    def cut(self, client: str) -> None:
        """Loses all messages from and to a client from now on."""
        self._on_fault("a client is cut off")
        self._cut_off.add(client)

    def mend(self) -> None:
        """Ends all partitions."""
        self._cut_off.clear()

    async def ask(
        self, client: str, serve: Callable[[], Awaitable[T]], patience: float, *, holds_lease: bool = False
    ) -> T:
        """Returns the first answer that arrives.

        Args:
            client: Who asks.
            serve: Carries out the request once; called for every copy of it that arrives.
            patience: The seconds to wait for an answer.
            holds_lease: Whether the request is only there to be under way.

        Raises:
            LostError: None has arrived.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        num_copies = 1
        if self._chance.random() < _SECOND_COPY:
            self._on_fault("a request is doubled")
            num_copies = 2
        copies = [self._start(self._carry(client, serve, answer, int(not holds_lease))) for _ in range(num_copies)]
        try:
            async with asyncio.timeout(patience):
                return await answer
        except TimeoutError:
            raise LostError from None
        finally:
            answer.cancel()
            self._start(self._tell_gone(copies))

    def _start(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    async def _carry(
        self, client: str, serve: Callable[[], Awaitable[T]], answer: asyncio.Future[T], counts: int
    ) -> None:
        if not await self._arrives(client, "a request"):
            return
        self.num_serving += counts
        try:
            result = await serve()
        finally:
            self.num_serving -= counts
        if await self._arrives(client, "an answer") and not answer.done():
            answer.set_result(result)

    async def _arrives(self, client: str, what: str) -> bool:
        await asyncio.sleep(self._chance.choice(_DELAYS))
        if client in self._cut_off or self._chance.random() < _LOSS:
            self._on_fault(f"{what} is lost")
            return False
        return True

    async def _tell_gone(self, copies: list[asyncio.Task[None]]) -> None:
        """Ends what the server still does for a caller who has gone away, a little later, if it hears of that."""
        if all(each.done() for each in copies):
            return
        is_silent = self._chance.random() < _SILENCE
        await asyncio.sleep(_KEEPALIVE if is_silent else self._chance.choice(_DELAYS))
        for each in copies:
            if each.cancel():
                self._on_fault("a call is cancelled")
