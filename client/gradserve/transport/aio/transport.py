"""Carries operations out over gRPC channels and sockets, with asyncio."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from gradserve.address import Address
from gradserve.calls.exchange import (
    Allocate,
    Background,
    CleanUp,
    DescribeTransport,
    Operation,
    Pause,
    Together,
    Track,
    Unary,
)
from gradserve.calls.retries import Attempt, Attempts, Contact, Step
from gradserve.memory.regions import ClientMemory
from gradserve.transport.aio.background import BackgroundTask
from gradserve.transport.aio.server import AsyncServer
from gradserve.transport.aio.together import ConcurrentSteps
from gradserve.transport.carrying import carry_out_async, traced_attempts
from gradserve.transport.cleanup import Cleanup
from gradserve.transport.process import OwnProcess
from gradserve.transport.progress import TransferProgress
from gradserve.transport.settings import ConnectionSettings

T = TypeVar("T")


class AsyncNetworkTransport:
    """Runs operations on the event loop in which it is made."""

    def __init__(self, addresses: Sequence[Address], settings: ConnectionSettings) -> None:
        """Takes the servers' addresses, in the order of exchanges' targets, and the settings."""
        self._settings = settings
        self._contact = Contact()
        self._process = OwnProcess()
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
        return await carry_out_async(self._attempts(operation), self._perform)

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
        return traced_attempts(operation, self._settings, self._contact)

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

        async def call(exchange: Unary, timeout: float | None) -> Any:
            return await servers[exchange.target].call_over_grpc(exchange, timeout)

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
