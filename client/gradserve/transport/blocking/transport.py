"""The blocking transport: performs the steps of operations in the calling thread, and of several at once."""

import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import grpc

from gradserve.calls.exchange import (
    Allocate,
    Background,
    CleanUp,
    DescribeTransport,
    Download,
    Local,
    Operation,
    Pause,
    Progress,
    Track,
    Unary,
    Upload,
    Work,
)
from gradserve.calls.retries import Attempt, Attempts
from gradserve.transport.blocking.background import BackgroundThread
from gradserve.transport.channel import ChannelMaker, DownloadParts, UploadParts
from gradserve.transport.driving import Member, Schedule, completed
from gradserve.transport.network import Network, Server
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.sockets.blocking import BlockingConnection, SecureBlockingConnection
from gradserve.transport.sockets.carrier import ConnectionKinds
from gradserve.transport.sockets.connection import Watch
from gradserve_protocol.address import Address
from gradserve_protocol.arrays import Array
from gradserve_protocol.frames import Metadata
from gradserve_protocol.tensors import Chunk
from gradserve_protocol.v1 import tensor_messages_pb2 as messages_pb2

T = TypeVar("T")
Outcome = Callable[[], Any]
"""A function that returns the answer to a step, or raises its error."""


class BlockingServer(Server):
    """A gRPC channel to a server, and the sockets beside it. Safe to use from several threads."""

    _channels: ClassVar[ChannelMaker] = grpc
    _connections = ConnectionKinds(BlockingConnection, SecureBlockingConnection)

    def start_over_grpc(self, unary: Unary, timeout: float | None, metadata: Metadata = ()) -> Any:
        """Starts a unary call over gRPC; returns gRPC's future for it."""
        call = self._channel.now.unary(unary.service, unary.method)
        return call.future(unary.request, timeout=timeout, metadata=metadata)

    async def _unary(self, unary: Unary, timeout: float | None, metadata: Metadata, watch: Watch | None) -> Any:
        with self._channel.waiting() if unary.wait else nullcontext(self._channel.now) as channel:
            call = channel.unary(unary.service, unary.method)
            if watch is None:
                # Waiting in this thread is faster than waiting for a future.
                return call(unary.request, timeout=timeout, metadata=metadata)
            future = call.future(unary.request, timeout=timeout, metadata=metadata)
            watch(future.cancel)
            return future.result()

    async def _put(self, upload: Upload, timeout: float | None, metadata: Metadata, watch: Watch | None) -> Any:
        put = self._channel.now.put
        if upload.progress is not None:
            return ReportedUpload(upload, upload.progress).run(put, timeout, metadata, watch)
        return carry_upload(upload, put, timeout, metadata, watch)

    async def _get(
        self, download: Download, timeout: float | None, metadata: Metadata, watch: Watch | None
    ) -> list[Array]:
        call = self._channel.now.get(download.request, timeout=timeout, metadata=metadata)
        if watch is not None:
            watch(call.cancel)
        parts = DownloadParts(download.progress)
        try:
            for part in call:
                parts.add(part)
        finally:
            call.cancel()
        return parts.finish()


def carry_upload(upload: Upload, put: Any, timeout: float | None, metadata: Metadata, watch: Watch | None) -> Any:
    """Makes the call with gRPC's `put`; returns its response, or raises gRPC's error."""
    parts = UploadParts(upload)
    may_begin: queue.SimpleQueue[bool] = queue.SimpleQueue()
    future = None

    def messages() -> Iterator[messages_pb2.PutTensorsRequest | Chunk]:
        if may_begin.get():
            yield from parts

    try:
        future = put.future(messages(), timeout=timeout, metadata=metadata)
        if watch is not None:
            watch(future.cancel)
        may_begin.put(True)
        return future.result()
    finally:
        _end(future)
        may_begin.put(False)


class ReportedUpload:
    """An upload whose progress is reported in the calling thread. gRPC's thread waits until that has been done.

    So an upload whose callback raises an exception is incomplete, and the server keeps nothing of it.
    """

    def __init__(self, upload: Upload, progress: Progress) -> None:
        self._progress = progress
        self._chunks = UploadParts(replace(upload, progress=None))
        self._due: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._may_go_on: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def run(self, put: Any, timeout: float | None, metadata: Metadata, watch: Watch | None) -> Any:
        """Makes the call with gRPC's `put`; returns its response, or raises gRPC's error or that of the callback."""
        future = None
        try:
            future = put.future(self._parts(), timeout=timeout, metadata=metadata)
            future.add_done_callback(lambda _: self._due.put(False))
            self._may_go_on.put(True)
            if watch is not None:
                watch(future.cancel)
            while self._due.get():
                self._progress.tell()
                self._may_go_on.put(True)
            return future.result()
        finally:
            # First: chunks that end without it are a complete upload.
            _end(future)
            self._may_go_on.put(False)

    def _parts(self) -> Iterator[messages_pb2.PutTensorsRequest | Chunk]:
        if not self._may_go_on.get():
            return
        self._progress.begin()
        for part in self._chunks:
            yield part
            if isinstance(part, Chunk) and self._progress.add(part.num_bytes):
                self._due.put(True)
                if not self._may_go_on.get():
                    return


def _end(future: Any) -> None:
    """Ends the call of an upload whose thread waits no more: an exception from outside may have ended the wait.

    Args:
        future: gRPC's future of the call; None if the exception came before gRPC had returned it.
    """
    if future is not None:
        future.cancel()


class NetworkTransport(Network[BlockingServer]):
    """Runs operations in the calling thread. Safe to use from several threads."""

    def __init__(self, addresses: Sequence[Address], settings: ConnectionSettings) -> None:
        super().__init__(BlockingServer, addresses, settings)

    def run(self, operation: Operation[T], /) -> T:
        """Returns the result of an operation, or raises its error."""
        return completed(self._run(operation))

    def close(self) -> None:
        """Disconnects; calls under way in other threads end with CallCancelledError."""
        completed(self._close())

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 (no event loop runs it)

    async def _work(self, run: Callable[[], Any]) -> Any:
        return run()

    async def _run_together(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        return ConcurrentSteps(self._perform, partial(_carry, self._servers), self._attempts).run(operations)

    def _in_background(self, begin: Callable[[], Operation[None]]) -> BackgroundThread:
        return BackgroundThread(
            begin, self._settings, partial(_start_over_grpc, self._servers), partial(_carry, self._servers)
        )

    async def _join(self, operation: BackgroundThread) -> None:
        operation.join()


def _carry(servers: Sequence[Server], attempt: Attempt, watch: Watch) -> Any:
    return completed(servers[attempt.exchange.target].carry(attempt, watch))


def _start_over_grpc(servers: Sequence[BlockingServer], unary: Unary, timeout: float | None, metadata: Metadata) -> Any:
    return servers[unary.target].start_over_grpc(unary, timeout, metadata)


class ConcurrentSteps:
    """Carries out steps of several operations at the same time, each call in a thread.

    The operations themselves run in the caller's thread only. So their default worker id is the caller's.
    """

    def __init__(
        self,
        perform: Callable[[Background | Local], Coroutine[Any, Any, Any]],
        carry: Callable[[Attempt, Watch], Any],
        attempts: Callable[[Operation[Any]], Attempts[Any]],
    ) -> None:
        self._perform = perform
        self._carry = carry
        self._attempts = attempts
        self._ended: queue.SimpleQueue[tuple[Member, Outcome]] = queue.SimpleQueue()
        self._under_way: dict[Member, Any] = {}
        self._pauses: list[tuple[float, int, Member]] = []
        self._numbers = itertools.count()
        self._cancelled: list[ThreadedCall] = []

    def run(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        """Returns the results of operations, or raises the first error when all have ended."""
        try:
            with closing(Schedule(operations, self._attempts, self)) as schedule:
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
            for each in self._cancelled:
                each.join()
        return schedule.results()

    def begin(self, member: Member, step: Attempt | Pause | Background | Local, /) -> None:
        """Begins a step."""
        self._under_way[member] = step
        match step:
            case Pause(seconds):
                heapq.heappush(self._pauses, (time.monotonic() + seconds, next(self._numbers), member))
            case Background() | DescribeTransport() | Allocate() | Track() | CleanUp() | Work():
                self._ended.put((member, lambda: completed(self._perform(step))))
            case Attempt():
                call = ThreadedCall(partial(self._carry, step))
                self._under_way[member] = call
                call.start(lambda: self._ended.put((member, call.result)))

    def cancel(self, member: Member, /) -> None:
        """Cancels a step."""
        call = self._under_way.pop(member, None)
        if isinstance(call, ThreadedCall):
            self._cancelled.append(call)
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
        self.join()
        if self._error is not None:
            raise self._error
        return self._answer

    def join(self) -> None:
        """Waits until the call has ended, if it has begun."""
        if self._thread is not None and self._thread.ident is not None:
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
