"""The calls over gRPC that are under way, and who makes them."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, cast

from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.rpc.boundary.status import Context

_FORGOTTEN_AT_ONCE = 2
"""For each client that is new, so that those with calls, which stay, do not let the others add up."""
_RESERVE = 8
"""A part of this size of all calls is for health checks alone."""


_GIVEN_UP_PER_SECOND = 50.0
"""How many calls a client may give up every second for as long as it likes."""


@dataclass
class _Caller:
    last: float
    num_calls: int = 0
    num_given_up: float = 0.0
    """Calls that it gave up lately: the number sinks with time."""
    counted_at: float = 0.0


class OpenCalls:
    """Limits the calls under way, and knows when each client made its last one.

    A call takes memory, in gRPC's core too, from its first to its last byte, even if nobody answers it any more.
    """

    def __init__(
        self, limit: int, max_callers: int, max_given_up: int, end: Callable[[Collection[str]], object]
    ) -> None:
        """Makes it with no call under way.

        Args:
            limit: The most calls.
            max_callers: The number of clients to remember.
            max_given_up: The most calls that a client may give up at once.
            end: Ends the connections of clients.
        """
        self._max_given_up = max_given_up
        self._end = end
        self._limit = limit
        self._max_callers = max_callers
        self._callers: OrderedDict[str, _Caller] = OrderedDict()
        self.count = 0
        """The number of calls under way."""

    def begin(self, context: Context, *, is_health: bool = False) -> None:
        """Counts a call until it has ended.

        Raises:
            ResourceExhaustedError: There are too many.
        """
        allowed = self._limit + self._limit // _RESERVE if is_health else self._limit
        if self.count >= allowed:
            raise ResourceExhaustedError(f"too many calls: {self.count} are under way, {self._limit} are allowed")
        name = context.peer()
        caller = self._callers.get(name)
        now = asyncio.get_running_loop().time()
        if caller is None:
            caller = self._callers[name] = _Caller(now)
            self._forget()
        else:
            self._callers.move_to_end(name)
        caller.last = now
        caller.num_calls += 1
        self.count += 1

        def end(_context: object) -> None:
            caller.num_calls -= 1
            self.count -= 1

        # The stubs want an object of a class of their own.
        cast("Any", context).add_done_callback(end)

    def give_up(self, context: Context) -> None:
        """Counts a call under way that its client has given up before the answer; ends a client that only does that.

        Calls that arrive wait in one queue of gRPC's core, those that were given up too. So whoever begins calls only
        to give them up keeps everybody waiting.
        """
        name = context.peer()
        caller = self._callers.get(name)
        if caller is None:
            return
        now = asyncio.get_running_loop().time()
        sunk = (now - caller.counted_at) * _GIVEN_UP_PER_SECOND
        caller.num_given_up, caller.counted_at = max(caller.num_given_up - sunk, 0.0) + 1, now
        if caller.num_given_up > self._max_given_up:
            caller.num_given_up = 0.0
            self._end((name,))

    def idle(self, clients: Iterable[str], since: float) -> list[str]:
        """Returns those clients that have no call under way and began none since a time, the longest idle first.

        Those that never made a call come before all others.
        """
        found = [(each, self._callers.get(each)) for each in clients]
        idle = [
            (float("-inf") if caller is None else caller.last, name)
            for name, caller in found
            if caller is None or not (caller.num_calls or caller.last > since)
        ]
        return [name for _, name in sorted(idle)]

    def _forget(self) -> None:
        """Forgets clients without a call, those idle for longest first."""
        for _ in range(_FORGOTTEN_AT_ONCE):
            if len(self._callers) <= self._max_callers:
                return
            name, oldest = self._callers.popitem(last=False)
            if oldest.num_calls:
                self._callers[name] = oldest
