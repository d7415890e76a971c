"""A gate before the operations of a server."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from google.protobuf.descriptor import MethodDescriptor

from gradserve_server.rpc.boundary.chain import Call, Handle
from tests.faults.operations import METHODS, WAITS


class Gate:
    """An interceptor that holds operations, until they are cancelled, before they are carried out.

    Those that wait for others by themselves pass.

    Attributes:
        is_closed: Whether it holds those that come.
        num_held: How many it holds.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self.num_held = 0

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        if method.name not in METHODS:
            return handle

        def gated(request: Any, call: Call) -> Awaitable[Any]:
            return self._hold() if self.is_closed and not _waits(request) else handle(request, call)

        return gated

    async def _hold(self) -> None:
        self.num_held += 1
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.num_held -= 1


def _waits(request: Any) -> bool:
    accumulator = getattr(request, "accumulator", None)
    return accumulator is not None and WAITS in accumulator.name
