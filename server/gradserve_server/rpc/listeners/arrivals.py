"""Calls that arrive at gRPC's server while it drains."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from gradserve_server.errors import UnavailableError
from gradserve_server.rpc.boundary.admission import Admission
from gradserve_server.rpc.boundary.status import Context, end_with

_QUIET_SECONDS = (0.05, 0.5)
"""How long no call may have arrived: at least, and where many came before."""

_MANY_CALLS = 250
"""In the second before. Then, or on a machine with much other work, some clients are slow to call again."""

_LOOK_SECONDS = 0.01
_MAX_SETTLE_SECONDS = 2.0

_HEALTH = "/grpc.health.v1.Health/"

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class Arrivals(grpc.aio.ServerInterceptor):
    """Keeps calls that arrive while the server drains, until its clients know that they have to go elsewhere.

    gRPC cancels a call that has arrived and was not begun when the server stops, and its client reads CANCELLED, as if
    it had done so itself. So the server goes on taking calls, but keeps their answers back until it has told
    clients to go elsewhere: one that waits for an answer sends nothing that could still arrive in the wrong moment, and
    when it tries again, it does so over another connection. Only checks of the health are answered throughout.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._stopping = asyncio.Event()
        self._arrivals: deque[float] = deque(maxlen=_MANY_CALLS)

    async def settle(self, probe: Callable[[], Awaitable[None]]) -> None:
        """Returns when no call has arrived for a moment, or too many of them do to wait for that.

        Args:
            probe: Makes a call, and returns with its answer: by then, calls that came before have been taken, too.
        """
        now = time.monotonic()
        num_recent = sum(now - arrival < 1 for arrival in self._arrivals)
        if num_recent == 0:
            return
        shortest, longest = _QUIET_SECONDS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_SETTLE_SECONDS):
                await self._quiet(shortest + (longest - shortest) * num_recent / _MANY_CALLS)
        await probe()

    async def _quiet(self, seconds: float) -> None:
        quiet_looks = 0
        # Many short looks: a loop that something holds up for a while is busy, not quiet.
        while quiet_looks * _LOOK_SECONDS < seconds:
            last_arrival = self._arrivals[-1]
            await asyncio.sleep(_LOOK_SECONDS)
            quiet_looks = quiet_looks + 1 if self._arrivals[-1] == last_arrival else 0

    def refuse(self) -> None:
        """Answers the calls that were kept waiting, and from now on any other at once."""
        self._stopping.set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """Returns the handler of a call that has arrived; while the server drains, late, and one that refuses."""
        self._arrivals.append(time.monotonic())
        if self._admission.is_open or handler_call_details.method.startswith(_HEALTH):
            return await continuation(handler_call_details)
        await self._stopping.wait()
        # Whatever kind of call it is: nothing of the request is read, and nothing comes before the status.
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, _requests: Any, context: Context) -> None:
        try:
            self._admission.check()
        except UnavailableError as error:
            await end_with(error, context)
