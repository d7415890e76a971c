"""Limits on the messages that gRPC's core holds: requests that arrive slowly, and replies that nobody reads.

The core buffers a request until it is complete, and does not say how much of it is there. So a request that does not
arrive promptly counts with the longest length allowed. The core takes replies whole, and keeps what the windows of the
client do not let through, with no limit of memory or time.
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Self

import grpc

from gradserve_server.config import LimitsConfig
from gradserve_server.errors import DeadlineExceededError, ResourceExhaustedError, ServiceError, UnavailableError
from gradserve_server.observe.calls import Way
from gradserve_server.rpc.listeners.grpc.calls import Connections, Context, OpenCalls, end_with, when_ended

PROMPT_SECONDS = 0.1
"""A request that arrives within this time is not slow."""
PRESSED_SECONDS = 5.0
"""The patience with slow requests while they take more than half of their room, and with unread replies while others
wait for room."""
SMALL_BYTES = 4096
"""Replies of up to this size do not wait for room: a call takes more than that."""
_REFUSAL_SECONDS = 5.0
"""Seconds that a client refused for its slowness gets to read why; then its connection ends."""
_COPIES = 2
"""Python and gRPC's core each hold a copy until the reply has left."""
_SHARE = 4
"""One client may take one part in this many of the room for replies."""
_LONGEST_TIMES = 10
"""A single reply may take this many times longer while others leave over the same connection."""
_CHECK_SECONDS = 0.5


@dataclass(frozen=True)
class _Slow:
    since: float
    peer: str


class ArrivingRequests:
    """The requests that gRPC is receiving. Made and used on one event loop.

    Prompt requests, such as those of small calls, cost next to nothing and are never refused. The number of slow ones
    is limited. Without room for another, the client with the most slow requests loses its oldest; if no client has more
    than the newcomer's, the newcomer is refused.
    """

    def __init__(self, limit: int, longest: int, idle_seconds: float, connections: Connections) -> None:
        self._max_slow = max(limit // longest, 1)
        self._idle_seconds = idle_seconds
        self._connections = connections
        self._prompt: dict[Context, float] = {}
        self._slow: dict[Context, _Slow] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._refusals: set[asyncio.Task[None]] = set()

    @property
    def num_slow(self) -> int:
        """The number of requests that are arriving slowly."""
        return len(self._slow)

    async def read(self, context: Context) -> Any:
        """Returns the next message of a call, or grpc.aio.EOF after the last.

        Raises:
            asyncio.CancelledError: The message was too slow, and the client has been told.
        """
        loop = asyncio.get_running_loop()
        self._prompt[context] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(PROMPT_SECONDS, self._check)
        try:
            return await context.read()
        except grpc.aio.AbortError:
            raise asyncio.CancelledError from None
        finally:
            if self._prompt.pop(context, None) is None:
                self._slow.pop(context, None)

    def _check(self) -> None:
        """Checks the requests that are arriving, and comes back as long as there are any."""
        loop = asyncio.get_running_loop()
        try:
            self._refuse_late(loop.time())
        finally:
            is_waiting = self._prompt or self._slow
            self._timer = loop.call_later(PROMPT_SECONDS, self._check) if is_waiting else None

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
        # The first says that the client was told, the others that the call had ended already.
        with contextlib.suppress(grpc.aio.AbortError, grpc.aio.UsageError, asyncio.CancelledError):
            await end_with(error, context)


@dataclass(eq=False)
class _Peer:
    """A client, with its unread replies in the order in which gRPC took them, and those that wait for room."""

    name: str
    progress: float
    used: int = 0
    unread: "dict[_Reply, float]" = field(default_factory=dict)
    waiting: "deque[tuple[_Reply, asyncio.Future[None]]]" = field(default_factory=deque)


@dataclass(eq=False, frozen=True, slots=True)
class _Reply:
    peer: _Peer
    cost: int
    """The bytes of it that gRPC's core holds."""


class UnreadReplies:
    """The replies that gRPC's core holds because their clients have not read them. Made and used on one event loop.

    A reply waits until there is room for it. If no reply leaves over a connection for too long, the connection ends.
    """

    def __init__(self, limit: int, idle_seconds: float, connections: Connections) -> None:
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._connections = connections
        self._peers: dict[str, _Peer] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._small: dict[Context, float] = {}
        self._left_behind: dict[Context, _Reply] = {}
        self.used = 0
        """The bytes of replies that gRPC holds."""
        self._waiting = 0

    def add_small(self, context: Context) -> None:
        """Notes the small reply of a call, which gRPC is about to get. It counts only if it does not leave soon."""
        loop = asyncio.get_running_loop()
        self._small[context] = loop.time()
        when_ended(context, self._forget_small)
        self._check_later(loop)

    async def enter(self, context: Context, num_bytes: int, *, is_kept: bool) -> None:
        """Waits until a reply may be given to gRPC. It counts until the call has ended.

        Args:
            context: The call.
            num_bytes: The length of the reply.
            is_kept: Whether the reply takes no memory of its own while it waits.

        Raises:
            ResourceExhaustedError: Too much is waiting already.
        """
        reply = await self._admitted(context.peer(), num_bytes, is_kept=is_kept)
        when_ended(context, lambda _: self._left(reply))

    @asynccontextmanager
    async def hold(self, context: Context, num_bytes: int) -> AsyncIterator[None]:
        """Waits until a part of a reply may be given to gRPC, in the block.

        Raises:
            ResourceExhaustedError: Too much is waiting already.
        """
        reply = await self._admitted(context.peer(), num_bytes, is_kept=False)
        try:
            yield
        finally:
            self._left(reply)

    async def _admitted(self, name: str, num_bytes: int, *, is_kept: bool) -> _Reply:
        loop = asyncio.get_running_loop()
        peer = self._peer(name)
        self._check_later(loop)
        reply = _Reply(peer, _COPIES * num_bytes)
        if not peer.waiting and self._fits(reply):
            self._admit(reply)
            return reply
        own_bytes = 0 if is_kept else num_bytes
        if self._waiting + own_bytes > self._limit:
            raise ResourceExhaustedError(
                f"{self.used} bytes of replies are unread, and {self._waiting} wait to be sent; "
                f"at most {self._limit} of each are allowed",
                code="GS_TOO_MANY_CALLS",
            )
        self._waiting += own_bytes
        try:
            await self._turn(reply)
        finally:
            self._waiting -= own_bytes
        return reply

    def _peer(self, name: str) -> _Peer:
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = _Peer(name, asyncio.get_running_loop().time())
        return peer

    async def _turn(self, reply: _Reply) -> None:
        turn = asyncio.get_running_loop().create_future()
        entry = (reply, turn)
        reply.peer.waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._left(reply)
            else:
                reply.peer.waiting.remove(entry)
                self._serve(reply.peer)
            raise

    def _fits(self, reply: _Reply) -> bool:
        return self._fits_share(reply) and (not self.used or self.used + reply.cost <= self._limit)

    def _fits_share(self, reply: _Reply) -> bool:
        return not reply.peer.used or reply.peer.used + reply.cost <= self._limit // _SHARE

    def _admit(self, reply: _Reply) -> None:
        peer, now = reply.peer, asyncio.get_running_loop().time()
        if not peer.used:
            peer.progress = now
        peer.unread[reply] = now
        peer.used += reply.cost
        self.used += reply.cost

    def _left(self, reply: _Reply) -> None:
        """Notes that a reply has left, or can no longer leave."""
        peer = reply.peer
        del peer.unread[reply]
        peer.used -= reply.cost
        self.used -= reply.cost
        peer.progress = asyncio.get_running_loop().time()
        self._serve(peer)
        for other in [each for each in self._peers.values() if each.waiting]:
            self._serve(other)

    def _serve(self, peer: _Peer) -> None:
        while peer.waiting:
            reply, turn = peer.waiting[0]
            if not turn.done():
                if not self._fits(reply):
                    return
                self._admit(reply)
                turn.set_result(None)
            peer.waiting.popleft()

    def _forget_small(self, context: Context) -> None:
        if self._small.pop(context, None) is None:
            self._left(self._left_behind.pop(context))

    def _check_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            self._timer = loop.call_later(_CHECK_SECONDS, self._check)

    def _check(self) -> None:
        """Checks unread replies, and comes back as long as there are any."""
        loop = asyncio.get_running_loop()
        try:
            self._end_unread(loop.time())
        finally:
            self._timer = loop.call_later(_CHECK_SECONDS, self._check) if self._peers or self._small else None

    def _end_unread(self, now: float) -> None:
        """Ends connections over which no reply has left for too long, and forgets clients without any."""
        for context in list(takewhile(lambda each: now - self._small[each] >= _CHECK_SECONDS, self._small)):
            del self._small[context]
            reply = self._left_behind[context] = _Reply(self._peer(context.peer()), _COPIES * SMALL_BYTES)
            self._admit(reply)
        if not self._peers:
            return
        self._peers = {name: peer for name, peer in self._peers.items() if peer.used or peer.waiting}
        reading = [each for each in self._peers.values() if each.used]
        ended = [each.name for each in reading if self._is_over(each, now)]
        if not ended and self._is_full:
            slowest = min(reading, key=lambda each: each.progress)
            if now - slowest.progress > min(PRESSED_SECONDS, self._idle_seconds):
                ended.append(slowest.name)
        if ended:
            self._connections.end(ended)

    def _is_over(self, peer: _Peer, now: float) -> bool:
        oldest = next(iter(peer.unread.values()))
        return now - peer.progress > self._idle_seconds or now - oldest > _LONGEST_TIMES * self._idle_seconds

    @property
    def _is_full(self) -> bool:
        """True if a client is waiting for room that others hold."""
        return any(each.waiting and self._fits_share(each.waiting[0][0]) for each in self._peers.values())


@dataclass(frozen=True)
class Traffic:
    """The calls of a listener, and the messages of theirs that gRPC's core holds.

    Attributes:
        calls: The calls in flight.
        requests: The requests that are arriving.
        replies: The replies that are leaving.
        way: Counts calls and bytes.
    """

    calls: OpenCalls
    requests: ArrivingRequests
    replies: UnreadReplies
    way: Way = field(default_factory=Way)

    @classmethod
    def within(cls, limits: LimitsConfig, way: Way | None = None) -> Self:
        """Returns the traffic of a server with these limits."""
        connections = Connections()
        room, seconds = limits.max_queued_bytes, limits.message_idle_seconds
        return cls(
            OpenCalls(limits.max_calls, limits.max_connections, limits.max_connection_calls, connections.end),
            ArrivingRequests(room, limits.max_message_bytes, seconds, connections),
            UnreadReplies(room, seconds, connections),
            way or Way(),
        )
