"""Requests that arrive slowly.

gRPC buffers a message until it is there as a whole, and does not say how much of it there is. So each message that does
not arrive at once counts as the longest that there may be.
"""

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import grpc

from gradserve_server.errors import DeadlineExceededError, ServiceError, UnavailableError
from gradserve_server.rpc.boundary.connections import Connections
from gradserve_server.rpc.boundary.status import Context, end_with

PROMPT_SECONDS = 0.1
"""A message that arrives within this time is not slow."""
PRESSED_SECONDS = 5.0
"""The time for a slow message while more than half of the room for such messages is taken."""
_REFUSAL_SECONDS = 5.0
"""The time for telling a client that it was too slow; then its connection ends."""


@dataclass(frozen=True)
class _Slow:
    since: float
    peer: str


class ArrivingRequests:
    """The messages that calls over gRPC are waiting for. Made and used on one event loop.

    Prompt messages, such as those of small calls, cost next to nothing and are never refused. The number of slow ones
    is limited. Where there is no room for another one, the client with most of them loses its oldest; if no client has
    more than the newcomer's, the newcomer is refused.
    """

    def __init__(self, limit: int, longest: int, idle_seconds: float, connections: Connections) -> None:
        """Makes it with no message under way.

        Args:
            limit: The memory for slow messages.
            longest: The longest message.
            idle_seconds: How long a message may take.
            connections: Ends connections.
        """
        self._max_slow = max(limit // longest, 1)
        self._idle_seconds = idle_seconds
        self._connections = connections
        self._prompt: dict[Context, float] = {}
        self._slow: dict[Context, _Slow] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._refusals: set[asyncio.Task[None]] = set()

    @property
    def num_slow(self) -> int:
        """The number of messages that arrive slowly."""
        return len(self._slow)

    async def read(self, context: Context) -> Any:
        """Returns the next message of a call, or grpc.aio.EOF after the last.

        Raises:
            asyncio.CancelledError: It was too slow; its client has been told.
        """
        loop = asyncio.get_running_loop()
        self._prompt[context] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(PROMPT_SECONDS, self._look)
        try:
            return await context.read()
        except grpc.aio.AbortError:
            raise asyncio.CancelledError from None
        finally:
            if self._prompt.pop(context, None) is None:
                self._slow.pop(context, None)

    def _look(self) -> None:
        """Looks at messages that arrive, and again later as long as there are any."""
        loop = asyncio.get_running_loop()
        try:
            self._refuse_late(loop.time())
        finally:
            is_waiting = self._prompt or self._slow
            self._timer = loop.call_later(PROMPT_SECONDS, self._look) if is_waiting else None

    def _refuse_late(self, now: float) -> None:
        for context in list(takewhile(lambda each: now - self._prompt[each] >= PROMPT_SECONDS, self._prompt)):
            self._add(context, _Slow(self._prompt.pop(context), context.peer()))
        is_pressed = len(self._slow) > self._max_slow // 2
        patience = min(PRESSED_SECONDS, self._idle_seconds) if is_pressed else self._idle_seconds
        for context in list(takewhile(lambda each: now - self._slow[each].since > patience, self._slow)):
            self._refuse(context, DeadlineExceededError(f"the request did not arrive within {patience:g} s"))

    def _add(self, context: Context, slow: _Slow) -> None:
        self._slow[context] = slow
        if len(self._slow) <= self._max_slow:
            return
        numbers = Counter(each.peer for each in self._slow.values())
        peer, most = numbers.most_common(1)[0]
        if most > numbers[slow.peer]:
            context = next(each for each, entry in self._slow.items() if entry.peer == peer)
        self._refuse(context, UnavailableError(f"more than {self._max_slow} requests arrive slowly"))

    def _refuse(self, context: Context, error: ServiceError) -> None:
        peer = self._slow.pop(context).peer
        task = asyncio.create_task(self._end(context, error))
        self._refusals.add(task)
        task.add_done_callback(self._refusals.discard)
        late = asyncio.get_running_loop().call_later(_REFUSAL_SECONDS, self._connections.end, (peer,))
        task.add_done_callback(lambda _: late.cancel())

    async def _end(self, context: Context, error: ServiceError) -> None:
        # Told, or ended meanwhile.
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError, asyncio.CancelledError):
            await end_with(error, context)
