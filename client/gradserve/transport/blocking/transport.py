"""The blocking transport: performs the steps of operations in the calling thread, and of several at once."""

import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

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
from gradserve.transport.blocking.background import BackgroundThread
from gradserve.transport.blocking.server import BlockingServer, Watch
from gradserve.transport.driving import Member, Schedule, attempts, drive
from gradserve.transport.lifetime import Cleanup, ProcessGuard
from gradserve.transport.progress import TransferProgress
from gradserve.transport.settings import ConnectionSettings
from gradserve_protocol.address import Address
from gradserve_protocol.frames import Metadata
from gradserve_protocol.memory.regions import ClientMemory

T = TypeVar("T")
Outcome = Callable[[], Any]
"""A function that returns the answer to a step, or raises its error."""


class NetworkTransport:
    """Runs operations in the calling thread. Safe to use from several threads."""

    def __init__(self, addresses: Sequence[Address], settings: ConnectionSettings) -> None:
        self._settings = settings
        self._contact = Contact()
        self._process = ProcessGuard()
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
        return drive(attempts(operation, self._settings, self._contact), self._perform)

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

        def start_call(exchange: Unary, timeout: float | None, metadata: Metadata) -> Any:
            return servers[exchange.target].start_over_grpc(exchange, timeout, metadata)

        def carry(attempt: Attempt, watch: Watch) -> Any:
            return servers[attempt.exchange.target].carry(attempt, watch)

        beside[:] = [each for each in beside if not each.is_done]
        beside.append(BackgroundThread(begin, self._settings, start_call, carry))

    def _attempts(self, operation: Operation[T]) -> Attempts[T]:
        return attempts(operation, self._settings, self._contact)

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


class ConcurrentSteps:
    """Carries out steps of several operations at the same time, each call in a thread.

    The operations themselves run in the caller's thread only. So their default worker id is the caller's.
    """

    def __init__(self, transport: NetworkTransport, attempts: Callable[[Operation[Any]], Attempts[Any]]) -> None:
        self._transport = transport
        self._attempts = attempts
        self._ended: queue.SimpleQueue[tuple[Member, Outcome]] = queue.SimpleQueue()
        self._under_way: dict[Member, Any] = {}
        self._pauses: list[tuple[float, int, Member]] = []
        self._numbers = itertools.count()
        self._calls_made: list[ThreadedCall] = []

    def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Returns the results of operations, or raises the first error when all have ended."""
        schedule = Schedule(operations, self._attempts, self)
        try:
            while not schedule.is_over:
                member, outcome = self._next()
                if self._under_way.pop(member, None) is None:
                    continue  # it was cancelled
                try:
                    answer = outcome()
                except BaseException as error:
                    schedule.fail(member, error)
                else:
                    schedule.answer(member, answer)
        finally:
            schedule.close()
            for each in self._calls_made:
                each.join()
        return schedule.results()

    def begin(self, member: Member, step: Attempt | Pause | Background | Local, /) -> None:
        """Begins a step."""
        self._under_way[member] = step
        match step:
            case Pause(seconds):
                heapq.heappush(self._pauses, (time.monotonic() + seconds, next(self._numbers), member))
            case Background(begin):
                self._ended.put((member, lambda: self._transport.begin(begin)))
            case DescribeTransport() | Allocate() | Track() | CleanUp():
                self._ended.put((member, lambda: self._transport.answer(step)))
            case Attempt():
                call = ThreadedCall(partial(self._transport.carry, step))
                self._under_way[member] = call
                self._calls_made.append(call)
                call.start(lambda: self._ended.put((member, call.result)))

    def cancel(self, member: Member, /) -> None:
        """Cancels a step."""
        call = self._under_way.pop(member)
        if isinstance(call, ThreadedCall):
            call.cancel()

    def _next(self) -> tuple[Member, Outcome]:
        """Waits until a call or a pause has ended."""
        while self._pauses:
            end, _, member = self._pauses[0]
            try:
                return self._ended.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                heapq.heappop(self._pauses)
                if member in self._under_way:
                    return member, _nothing
        return self._ended.get()


class ThreadedCall:
    """A call that a thread makes, and another one can cancel."""

    def __init__(self, make: Callable[[Watch], Any]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._interrupt: Callable[[], object] | None = None
        self._is_cancelled = False
        self._answer: Any = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, report: Callable[[], object]) -> None:
        """Begins the call; `report` is called when it has ended."""
        self._thread = threading.Thread(target=self._run, args=(report,), name="gradserve-call", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Interrupts the call."""
        with self._lock:
            self._is_cancelled = True
            if self._interrupt is not None:
                self._interrupt()

    def result(self) -> Any:
        """Returns the answer of the ended call, or raises its error."""
        if self._error is not None:
            raise self._error
        return self._answer

    def join(self) -> None:
        """Waits until the call has ended."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, report: Callable[[], object]) -> None:
        try:
            self._answer = self._make(self._watch)
        except BaseException as error:
            self._error = error
        report()

    def _watch(self, interrupt: Callable[[], object]) -> None:
        with self._lock:
            self._interrupt = interrupt
            if self._is_cancelled:
                interrupt()


def _nothing() -> None:
    """Answers a pause."""
