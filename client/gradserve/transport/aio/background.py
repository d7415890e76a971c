"""Operations that run in the background, in a task.

They refer only to channels, not to the client: so a forgotten client is collected, which stops them.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import grpc

from gradserve.calls.exchange import CleanUp, Operation, Pause, Unary, forget
from gradserve.calls.retries import Attempt, Contact, Step
from gradserve.errors import GradserveError
from gradserve.lasting import keep_doing
from gradserve.transport.carrying import attempts, carry_out_async
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.status import error_from_status

_log = logging.getLogger("gradserve")

_JOIN_SECONDS = 5.0


class BackgroundTask:
    """Carries out an operation of exchanges and pauses in a task; begins it again after a fault of its own."""

    def __init__(
        self,
        begin: Callable[[], Operation[None]],
        settings: ConnectionSettings,
        call: Callable[[Unary, float | None], Awaitable[Any]],
        carry: Callable[[Attempt], Awaitable[Any]],
    ) -> None:
        """Begins it on the running event loop.

        Args:
            begin: Begins the operation.
            settings: The settings of the connection.
            call: Makes a unary call over gRPC.
            carry: Makes a call with tensors.
        """
        self._loop = asyncio.get_running_loop()
        work = partial(_carry_out, begin, settings, call, carry)
        lasting = keep_doing("an operation in the background", work, _log)
        self._task = self._loop.create_task(lasting, name="gradserve-background")

    @property
    def is_done(self) -> bool:
        """True if the operation has ended."""
        return self._task.done()

    def stop(self) -> None:
        """Stops the operation soon. Safe in any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def join(self) -> None:
        """Waits until a stopped operation has ended."""
        await asyncio.wait([self._task], timeout=_JOIN_SECONDS)


async def _carry_out(
    begin: Callable[[], Operation[None]],
    settings: ConnectionSettings,
    call: Callable[[Unary, float | None], Awaitable[Any]],
    carry: Callable[[Attempt], Awaitable[Any]],
) -> None:
    async def perform(step: Step) -> Any:
        return await _perform(step, call, carry)

    with suppress(GradserveError, grpc.aio.UsageError):  # the latter: the channel is closed
        await carry_out_async(attempts(begin(), settings, Contact()), perform)


async def _perform(
    step: Any,
    call: Callable[[Unary, float | None], Awaitable[Any]],
    carry: Callable[[Attempt], Awaitable[Any]],
) -> Any:
    match step:
        case Attempt(Unary() as unary, timeout):
            try:
                return await call(unary, timeout)
            except grpc.aio.AioRpcError as error:
                raise error_from_status(error.code(), error.details(), error.trailing_metadata()) from None
        case Attempt():
            return await carry(step)
        case Pause(seconds):
            return await asyncio.sleep(seconds)
        case CleanUp():
            return forget
    raise TypeError(f"expected an exchange or a pause, got {step!r}")
