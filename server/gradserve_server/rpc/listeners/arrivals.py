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
"""Seconds without a new call before the drain continues: normally, and after many calls."""

_MANY_CALLS = 250
"""The number of calls in the last second that are many. Then, or on a busy machine, some clients are slow to call
again."""

_LOOK_SECONDS = 0.01
_MAX_SETTLE_SECONDS = 2.0

_HEALTH = "/grpc.health.v1.Health/"

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class Arrivals(grpc.aio.ServerInterceptor):
    """Holds calls that arrive while the server drains, until its clients know that they must connect elsewhere.

    When a server stops, gRPC cancels calls that have arrived but not begun; their clients read CANCELLED, as if they
    had cancelled the calls themselves. So the server goes on taking calls, but holds back their answers until it has
    told clients to go elsewhere. A client that waits for an answer sends nothing that could arrive at the wrong moment,
    and tries again over another connection. Only health checks are answered throughout.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._stopping = asyncio.Event()
        self._arrivals: deque[float] = deque(maxlen=_MANY_CALLS)

    async def settle(self, probe: Callable[[], Awaitable[None]]) -> None:
        """Returns when no call has arrived for a moment, or when too many arrive to wait for that.

        Args:
            probe: Makes a call, and returns when it is answered: by then, earlier calls have been taken, too.
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
        # Many short checks, because a loop that is held up for a while is busy, not quiet.
        while quiet_looks * _LOOK_SECONDS < seconds:
            last_arrival = self._arrivals[-1]
            await asyncio.sleep(_LOOK_SECONDS)
            quiet_looks = quiet_looks + 1 if self._arrivals[-1] == last_arrival else 0

    def refuse(self) -> None:
        """Refuses the calls that are held, and any later call at once."""
        self._stopping.set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """Returns the handler of a new call; while the server drains, returns late, and one that refuses."""
        self._arrivals.append(time.monotonic())
        if self._admission.is_open or handler_call_details.method.startswith(_HEALTH):
            return await continuation(handler_call_details)
        await self._stopping.wait()
        # It fits every kind of call: the request is not read, and nothing is sent before the status.
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, _requests: Any, context: Context) -> None:
        try:
            self._admission.check()
        except UnavailableError as error:
            await end_with(error, context)
