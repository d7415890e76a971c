"""The asyncio transport: performs the steps of operations, of several at once, and of those in the background."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any, ClassVar, TypeVar

import grpc

from gradserve.calls.exchange import (
    Background,
    CleanUp,
    Download,
    Local,
    Operation,
    Pause,
    Progress,
    Unary,
    Upload,
    forget,
)
from gradserve.calls.retries import Attempt, Attempts, Contact, Step
from gradserve.errors import CallCancelledError, DeadlineExceededError, GradserveError, UnavailableError
from gradserve.transport.channel import ChannelMaker, DownloadParts, UploadParts
from gradserve.transport.driving import Member, Schedule, attempts, drive
from gradserve.transport.network import Network, Server, is_being_cancelled
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.sockets.aio import AsyncConnection, SecureAsyncConnection
from gradserve.transport.sockets.carrier import ConnectionKinds
from gradserve.transport.sockets.connection import Watch
from gradserve.transport.status import error_from_status
from gradserve_protocol.address import Address
from gradserve_protocol.arrays import Array
from gradserve_protocol.frames import Metadata
from gradserve_protocol.lasting import keep_doing

T = TypeVar("T")
_log = logging.getLogger("gradserve")
_JOIN_SECONDS = 5.0
_CLOCKS_SECONDS = 0.01
"""The most by which the clock of gRPC's deadlines is ahead of the one by which it tells the time that is left."""
_NO_STATUS = "Internal error from Core"
"""gRPC's words instead of the status of a stream, if the server ends it while a message is being sent."""


class AsyncServer(Server):
    """A gRPC channel to a server, and the sockets beside it."""

    _channels: ClassVar[ChannelMaker] = grpc.aio
    _connections = ConnectionKinds(AsyncConnection, SecureAsyncConnection)

    async def call_over_grpc(self, unary: Unary, timeout: float | None, metadata: Metadata = ()) -> Any:
        """Makes a unary call over gRPC, and raises gRPC's errors."""
        return await self._unary(unary, timeout, metadata)

    async def _unary(self, unary: Unary, timeout: float | None, metadata: Metadata, _watch: Watch | None = None) -> Any:
        if not unary.wait:
            call = self._channel.now.unary(unary.service, unary.method)
            return await call(unary.request, timeout=timeout, metadata=metadata)
        with self._channel.waiting() as channel:
            call = channel.unary(unary.service, unary.method)
            return await call(unary.request, timeout=timeout, metadata=metadata)

    async def _get(
        self, download: Download, timeout: float | None, metadata: Metadata, _watch: Watch | None
    ) -> list[Array]:
        call = self._channel.now.get(download.request, timeout=timeout, metadata=metadata)
        parts = DownloadParts(download.progress)
        try:
            async for part in call:
                parts.add(part)
        finally:
            call.cancel()
        return parts.finish()

    async def _put(self, upload: Upload, timeout: float | None, metadata: Metadata, _watch: Watch | None) -> Any:
        call = self._channel.now.put(iter(UploadParts(upload)), timeout=timeout, metadata=metadata)
        try:
            return await response_of(call, upload.progress)
        except asyncio.CancelledError:
            if self._closed or is_being_cancelled():
                raise
            raise _cut_short(call) from None


async def response_of(call: Any, progress: Progress | None = None) -> Any:
    """Returns the response to an upload over gRPC, or raises the error that its caller gets.

    gRPC cancels an upload, or loses its status, if the call ends while a message is being sent.
    """
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        if error.details() == _NO_STATUS:
            raise _cut_short(call) from None
        raise
    except (asyncio.CancelledError, CallCancelledError):
        if progress is not None and progress.failure is not None:
            raise progress.failure from None  # of which gRPC says only that it has cancelled the call
        raise


def _cut_short(call: Any) -> GradserveError:
    """Returns the error for an upload that has ended in the middle, and not because its task was cancelled."""
    left = call.time_remaining()
    if left is not None and left < _CLOCKS_SECONDS:
        return DeadlineExceededError("the time of the call was over before the server had all of its upload")
    return UnavailableError(
        "the server ended the upload before it had all of it; gRPC lost the reason", code="GS_CONNECTION_LOST"
    )


class BackgroundTask:
    """Carries out an operation of exchanges and pauses in a task; begins it again after a fault of its own."""

    def __init__(
        self,
        begin: Callable[[], Operation[None]],
        settings: ConnectionSettings,
        call: Callable[[Unary, float | None, Metadata], Awaitable[Any]],
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
    call: Callable[[Unary, float | None, Metadata], Awaitable[Any]],
    carry: Callable[[Attempt], Awaitable[Any]],
) -> None:
    async def perform(step: Step) -> Any:
        return await _perform(step, call, carry)

    with suppress(GradserveError, grpc.aio.UsageError):  # the latter: the channel is closed
        await drive(attempts(begin(), settings, Contact(), in_background=True), perform)


async def _perform(
    step: Any,
    call: Callable[[Unary, float | None, Metadata], Awaitable[Any]],
    carry: Callable[[Attempt], Awaitable[Any]],
) -> Any:
    match step:
        case Attempt(Unary() as unary, timeout, metadata):
            try:
                return await call(unary, timeout, metadata)
            except grpc.aio.AioRpcError as error:
                raise error_from_status(error.code(), error.details(), error.trailing_metadata()) from None
        case Attempt():
            return await carry(step)
        case Pause(seconds):
            return await asyncio.sleep(seconds)
        case CleanUp():
            return forget
    raise TypeError(f"expected an exchange or a pause, got {step!r}")


class ConcurrentSteps:
    """Carries out steps of several operations at the same time, each in a task; the operations run in the caller's."""

    def __init__(
        self,
        perform: Callable[[Attempt | Pause | Background | Local], Awaitable[Any]],
        attempts: Callable[[Operation[Any]], Attempts[Any]],
    ) -> None:
        self._perform = perform
        self._attempts = attempts
        self._under_way: dict[Member, asyncio.Task[Any]] = {}
        self._cancelled: list[asyncio.Task[Any]] = []

    async def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Returns the results of operations, or raises the first error when all have ended."""
        try:
            with closing(Schedule(operations, self._attempts, self)) as schedule:
                while not schedule.is_over:
                    await asyncio.wait(self._under_way.values(), return_when=asyncio.FIRST_COMPLETED)
                    for member, task in list(self._under_way.items()):
                        if task.done() and self._under_way.get(member) is task:
                            del self._under_way[member]
                            _report(schedule, member, task)
        finally:
            await asyncio.gather(*self._cancelled, return_exceptions=True)
        return schedule.results()

    def begin(self, member: Member, step: Attempt | Pause | Background | Local, /) -> None:
        """Begins a step."""
        self._under_way[member] = asyncio.ensure_future(self._perform(step))

    def cancel(self, member: Member, /) -> None:
        """Cancels a step."""
        task = self._under_way.pop(member, None)
        if task is not None:
            task.cancel()
            self._cancelled.append(task)


def _report(schedule: Schedule, member: Member, task: asyncio.Task[Any]) -> None:
    try:
        answer = task.result()
    except BaseException as error:
        schedule.fail(member, error)
    else:
        schedule.answer(member, answer)


class AsyncNetworkTransport(Network[AsyncServer]):
    """Runs operations on the event loop in which it is made."""

    def __init__(self, addresses: Sequence[Address], settings: ConnectionSettings) -> None:
        super().__init__(AsyncServer, addresses, settings)

    async def run(self, operation: Operation[T], /) -> T:
        """Returns the result of an operation, or raises its error."""
        return await self._run(operation)

    async def close(self) -> None:
        """Disconnects; calls under way end with CallCancelledError."""
        await self._close()

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _work(self, run: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(run)

    async def _run_together(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        return await ConcurrentSteps(self._perform, self._attempts).run(operations)

    def _in_background(self, begin: Callable[[], Operation[None]]) -> BackgroundTask:
        return BackgroundTask(
            begin, self._settings, partial(_call_over_grpc, self._servers), partial(_carry, self._servers)
        )

    async def _join(self, operation: BackgroundTask) -> None:
        await operation.join()


async def _carry(servers: Sequence[Server], attempt: Attempt) -> Any:
    return await servers[attempt.exchange.target].carry(attempt)


async def _call_over_grpc(
    servers: Sequence[AsyncServer], unary: Unary, timeout: float | None, metadata: Metadata
) -> Any:
    return await servers[unary.target].call_over_grpc(unary, timeout, metadata)
