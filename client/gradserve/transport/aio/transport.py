"""The asyncio transport: performs the steps of operations, of several at once, and of those in the background."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import grpc

from gradserve.calls.exchange import (
    Allocate,
    Background,
    CleanUp,
    DescribeTransport,
    Local,
    Operation,
    Pause,
    Together,
    Track,
    Unary,
    forget,
)
from gradserve.calls.retries import Attempt, Attempts, Contact, Step
from gradserve.errors import GradserveError
from gradserve.transport.aio.server import AsyncServer
from gradserve.transport.driving import Member, Schedule, attempts, drive_async
from gradserve.transport.lifetime import Cleanup, ProcessGuard
from gradserve.transport.progress import TransferProgress
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.status import error_from_status
from gradserve_protocol.address import Address
from gradserve_protocol.frames import Metadata
from gradserve_protocol.lasting import keep_doing
from gradserve_protocol.memory.regions import ClientMemory

T = TypeVar("T")
_log = logging.getLogger("gradserve")
_JOIN_SECONDS = 5.0


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
        await drive_async(attempts(begin(), settings, Contact(), in_background=True), perform)


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
        schedule = Schedule(operations, self._attempts, self)
        try:
            while not schedule.is_over:
                await asyncio.wait(self._under_way.values(), return_when=asyncio.FIRST_COMPLETED)
                for member, task in list(self._under_way.items()):
                    if task.done() and self._under_way.get(member) is task:
                        del self._under_way[member]
                        _report(schedule, member, task)
        finally:
            schedule.close()
            await asyncio.gather(*self._cancelled, return_exceptions=True)
        return schedule.results()

    def begin(self, member: Member, step: Attempt | Pause | Background | Local, /) -> None:
        """Begins a step."""
        self._under_way[member] = asyncio.ensure_future(self._perform(step))

    def cancel(self, member: Member, /) -> None:
        """Cancels a step."""
        task = self._under_way.pop(member)
        task.cancel()
        self._cancelled.append(task)


def _report(schedule: Schedule, member: Member, task: asyncio.Task[Any]) -> None:
    try:
        answer = task.result()
    except BaseException as error:
        schedule.fail(member, error)
    else:
        schedule.answer(member, answer)


class AsyncNetworkTransport:
    """Runs operations on the event loop in which it is made."""

    def __init__(self, addresses: Sequence[Address], settings: ConnectionSettings) -> None:
        self._settings = settings
        self._contact = Contact()
        self._process = ProcessGuard()
        self._memory = ClientMemory(shares=settings.shares_memory, kept_bytes=settings.sockets.kept_bytes)
        self._servers = tuple(
            AsyncServer(address, target, settings, self._memory) for target, address in enumerate(addresses)
        )
        self._background: list[BackgroundTask] = []
        self._clean_ups: list[BackgroundTask] = []
        self._cleanup = Cleanup(self, partial(_abandon, self._background, self._servers))

    async def run(self, operation: Operation[T], /) -> T:
        """Returns the result of an operation, or raises its error."""
        self._process.check()
        return await drive_async(self._attempts(operation), self._perform)

    async def close(self) -> None:
        """Disconnects; calls under way end with CallCancelledError."""
        self._process.check()
        for each in self._clean_ups:
            await each.join()
        _stop([*self._background, *self._clean_ups])
        for each in self._background:
            await each.join()
        for server in self._servers:
            await server.close()
        self._cleanup.call_off()

    def _attempts(self, operation: Operation[T]) -> Attempts[T]:
        return attempts(operation, self._settings, self._contact)

    async def _perform(self, step: Step) -> Any:
        match step:
            case Attempt():
                return await self._servers[step.exchange.target].carry(step)
            case Pause(seconds):
                return await asyncio.sleep(seconds)
            case Background(begin):
                return self._begin(begin, self._background)
            case DescribeTransport(target):
                return self._servers[target].info
            case Allocate(shape, dtype):
                return self._memory.empty(shape, dtype)
            case Track():
                return TransferProgress.of(step)
            case CleanUp():
                return self._clean_up
            case Together(operations):
                return await ConcurrentSteps(self._perform, self._attempts).run(operations)

    def _clean_up(self, begin: Callable[[], Operation[None]]) -> None:
        with suppress(RuntimeError):  # the event loop has ended, and the channel with it
            self._begin(begin, self._clean_ups)

    def _begin(self, begin: Callable[[], Operation[None]], beside: list[BackgroundTask]) -> None:
        servers = self._servers

        async def call(exchange: Unary, timeout: float | None, metadata: Metadata) -> Any:
            return await servers[exchange.target].call_over_grpc(exchange, timeout, metadata)

        async def carry(attempt: Attempt) -> Any:
            return await servers[attempt.exchange.target].carry(attempt)

        beside[:] = [each for each in beside if not each.is_done]
        beside.append(BackgroundTask(begin, self._settings, call, carry))


def _abandon(background: Sequence[BackgroundTask], servers: Sequence[AsyncServer]) -> None:
    _stop(background)
    for each in servers:
        each.abandon()


def _stop(background: Sequence[BackgroundTask]) -> None:
    for each in background:
        each.stop()
