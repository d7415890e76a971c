"""The calls over gRPC that are under way, and who makes them."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.rpc.boundary.status import Context

_FORGOTTEN_AT_ONCE = 2
"""For each client that is new, so that those with calls, which stay, do not let the others add up."""
_RESERVE = 8
"""A part of this size of all calls is for health checks alone."""


@dataclass
class _Caller:
    last: float
    num_calls: int = 0


class OpenCalls:
    """Limits the calls under way, and knows when each client made its last one.

    A call takes memory, in gRPC's core too, from its first to its last byte, even if nobody answers it any more.
    """

    def __init__(self, limit: int, max_callers: int) -> None:
        """Takes the most calls, and the number of clients to remember."""
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
