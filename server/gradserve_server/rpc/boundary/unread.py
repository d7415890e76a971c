"""Replies that their clients have not read yet.

gRPC's core takes a whole reply, and keeps what the client's windows do not let through. It sets no limit, neither of
memory nor of time.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, cast

from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.rpc.boundary.connections import Connections
from gradserve_server.rpc.boundary.status import Context

SMALL_BYTES = 4096
"""Replies of up to this size do not wait for room: a call takes more than that."""
PRESSED_SECONDS = 5.0
"""How long a client may leave its replies unread while others wait for room."""
_COPIES = 2
"""Python and gRPC's core each have one until the reply has left."""
_SHARE = 4
"""One client may have this part of the room, the others wait."""
_LONGEST_TIMES = 10
"""One reply may take this many times as long, if others leave over the same connection meanwhile."""
_LOOK_SECONDS = 0.5


@dataclass(eq=False)
class _Peer:
    """A client, with the replies that it has not read, in the order in which gRPC got them, and those that wait."""

    name: str
    progress: float
    used: int = 0
    unread: "dict[_Reply, float]" = field(default_factory=dict)
    waiting: "deque[tuple[_Reply, asyncio.Future[None]]]" = field(default_factory=deque)


@dataclass(eq=False, frozen=True)
class _Reply:
    peer: _Peer
    num_bytes: int

    @property
    def cost(self) -> int:
        return _COPIES * self.num_bytes


class UnreadReplies:
    """The replies that gRPC has and their clients have not read. Made and used on one event loop.

    A reply for which there is no room waits. If no reply leaves over a connection for too long, the connection ends.
    """

    def __init__(self, limit: int, idle_seconds: float, connections: Connections) -> None:
        """Takes the memory for replies, how long a client may leave them unread, and what ends connections."""
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._connections = connections
        self._peers: dict[str, _Peer] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._small: dict[Context, float] = {}
        self._left_behind: dict[Context, _Reply] = {}
        self.used = 0
        """The bytes of replies that gRPC has."""
        self._waiting = 0

    def add_small(self, context: Context) -> None:
        """Notes that gRPC is about to get the small reply of a call. It counts if it does not leave soon."""
        loop = asyncio.get_running_loop()
        self._small[context] = loop.time()
        cast("Any", context).add_done_callback(self._forget_small)
        self._look_later(loop)

    async def enter(self, context: Context, num_bytes: int, *, is_kept: bool) -> None:
        """Waits until a reply may be given to gRPC. It counts until the call has ended.

        Args:
            context: The call.
            num_bytes: The length of the reply.
            is_kept: True if the reply takes no memory of its own while it waits.

        Raises:
            ResourceExhaustedError: Too much waits already.
        """
        reply = await self._admitted(context.peer(), num_bytes, is_kept=is_kept)
        # The stubs want an object of a class of their own.
        cast("Any", context).add_done_callback(lambda _: self._left(reply))

    @asynccontextmanager
    async def hold(self, context: Context, num_bytes: int) -> AsyncIterator[None]:
        """Waits until a part of a reply may be given to gRPC, which takes it in the block.

        Raises:
            ResourceExhaustedError: Too much waits already.
        """
        reply = await self._admitted(context.peer(), num_bytes, is_kept=False)
        try:
            yield
        finally:
            self._left(reply)

    async def _admitted(self, name: str, num_bytes: int, *, is_kept: bool) -> _Reply:
        loop = asyncio.get_running_loop()
        peer = self._peer(name)
        self._look_later(loop)
        reply = _Reply(peer, num_bytes)
        if not peer.waiting and self._fits(reply):
            self._admit(reply)
            return reply
        own_bytes = 0 if is_kept else num_bytes
        if self._waiting + own_bytes > self._limit:
            raise ResourceExhaustedError(
                f"{self.used} bytes of replies are unread, and {self._waiting} wait to be sent; "
                f"at most {self._limit} of each are allowed"
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
        """Notes that a reply has left, or cannot leave any more."""
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

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            self._timer = loop.call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Looks at unread replies, and again later as long as there are any."""
        loop = asyncio.get_running_loop()
        try:
            self._end_unread(loop.time())
        finally:
            self._timer = loop.call_later(_LOOK_SECONDS, self._look) if self._peers or self._small else None

    def _end_unread(self, now: float) -> None:
        """Ends connections over which no reply has left for too long, and forgets clients without any."""
        for context in list(takewhile(lambda each: now - self._small[each] >= _LOOK_SECONDS, self._small)):
            del self._small[context]
            reply = self._left_behind[context] = _Reply(self._peer(context.peer()), SMALL_BYTES)
            self._admit(reply)
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
        """True if a client waits that could have more if others had less."""
        return any(each.waiting and self._fits_share(each.waiting[0][0]) for each in self._peers.values())
