"""Carries operations out over gRPC channels and sockets, in the calling thread."""

import time
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
    Local,
    Operation,
    Pause,
    Together,
    Track,
    Unary,
)
from gradserve.calls.retries import Attempt, Attempts, Contact, Step
from gradserve.memory.regions import ClientMemory
from gradserve.transport.blocking.background import BackgroundThread
from gradserve.transport.blocking.server import BlockingServer
from gradserve.transport.blocking.sockets import Watch
from gradserve.transport.blocking.together import ConcurrentSteps
from gradserve.transport.carrying import carry_out, traced_attempts
from gradserve.transport.cleanup import Cleanup
from gradserve.transport.process import OwnProcess
from gradserve.transport.progress import TransferProgress
from gradserve.transport.settings import ConnectionSettings

T = TypeVar("T")


class NetworkTransport:
    """Runs operations in the calling thread. Safe to use from several threads."""

    def __init__(self, addresses: Sequence[Address], settings: ConnectionSettings) -> None:
        """Takes the servers' addresses, in the order of exchanges' targets, and the settings."""
        self._settings = settings
        self._contact = Contact()
        self._process = OwnProcess()
        self._memory = ClientMemory(shares=settings.shares_memory, kept_bytes=settings.sockets.kept_bytes)
        self._servers = tuple(
            BlockingServer(address, target, settings, self._memory) for target, address in enumerate(addresses)
        )
        self._background: list[BackgroundThread] = []
        self._clean_ups: list[BackgroundThread] = []
        self._cleanup = Cleanup(self, partial(_abandon, self._background, self._servers))

    def run(self, operation: Operation[T], /) -> T:
        """Returns the result of an operation, or raises its error."""
        self._process.check()
        return carry_out(traced_attempts(operation, self._settings, self._contact), self._perform)

    def close(self) -> None:
        """Disconnects; calls under way in other threads end with CallCancelledError."""
        self._process.check()
        for each in self._clean_ups:
            each.join()
        _stop(self._background)
        for each in self._background:
            each.join()
        for server in self._servers:
            server.close()
        self._cleanup.call_off()

    def carry(self, attempt: Attempt, watch: Watch | None, /) -> Any:
        """Makes a call in this thread; `watch` is told what interrupts it from another thread."""
        return self._servers[attempt.exchange.target].carry(attempt, watch)

    def begin(self, begin: Callable[[], Operation[None]], /) -> None:
        """Runs an operation in the background."""
        self._begin(begin, self._background)

    def answer(self, step: Local, /) -> Any:
        """Answers what needs no server."""
        match step:
            case DescribeTransport(target):
                return self._servers[target].info
            case Allocate(shape, dtype):
                return self._memory.empty(shape, dtype)
            case Track():
                return TransferProgress.of(step)
            case CleanUp():
                return self._clean_up

    def _clean_up(self, begin: Callable[[], Operation[None]]) -> None:
        with suppress(RuntimeError):  # the interpreter ends, and starts no threads any more
            self._begin(begin, self._clean_ups)

    def _begin(self, begin: Callable[[], Operation[None]], beside: list[BackgroundThread]) -> None:
        servers = self._servers

        def start_call(exchange: Unary, timeout: float | None) -> Any:
            return servers[exchange.target].start_over_grpc(exchange, timeout)

        def carry(attempt: Attempt, watch: Watch) -> Any:
            return servers[attempt.exchange.target].carry(attempt, watch)

        beside[:] = [each for each in beside if not each.is_done]
        beside.append(BackgroundThread(begin, self._settings, start_call, carry))

    def _attempts(self, operation: Operation[T]) -> Attempts[T]:
        return traced_attempts(operation, self._settings, self._contact)

    def _perform(self, step: Step) -> Any:
        match step:
            case Attempt(exchange):
                return self._servers[exchange.target].carry(step, None)
            case Pause(seconds):
                return time.sleep(seconds)
            case Background(begin):
                return self.begin(begin)
            case DescribeTransport() | Allocate() | Track() | CleanUp():
                return self.answer(step)
            case Together(operations):
                return ConcurrentSteps(self, self._attempts).run(operations)


def _abandon(background: Sequence[BackgroundThread], servers: Sequence[BlockingServer]) -> None:
    _stop(background)
    for each in servers:
        each.abandon()


def _stop(background: Sequence[BackgroundThread]) -> None:
    for each in background:
        each.stop()
