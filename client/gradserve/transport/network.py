"""The connections of a client to its servers: what both transports do alike.

Everything is written once, as coroutines. Those of the blocking transport never wait for an event loop, because
whatever they await blocks the thread; `completed` runs them.
"""

import asyncio
import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import grpc

from gradserve.calls.exchange import (
    NOT_CARRIED,
    Allocate,
    Background,
    CleanUp,
    DescribeTransport,
    Download,
    Introduce,
    Operation,
    Pause,
    Repeat,
    Reply,
    Together,
    Track,
    Unary,
    Upload,
    Whole,
    Work,
)
from gradserve.calls.retries import Attempt, Attempts, Contact, Step
from gradserve.errors import ForkedClientError, GradserveError
from gradserve.results import TransportInfo
from gradserve.transport.channel import CallCredentials, Channel, ChannelMaker, closed
from gradserve.transport.driving import attempts, drive
from gradserve.transport.progress import TransferProgress
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.sockets.carrier import Carrier, ConnectionKinds
from gradserve.transport.sockets.connection import TimeLimit, Watch
from gradserve_protocol.address import Address
from gradserve_protocol.arrays import Array
from gradserve_protocol.frames import Metadata
from gradserve_protocol.memory.pool import ClientMemory
from gradserve_protocol.v1 import tensor_messages_pb2

T = TypeVar("T")
ServerT = TypeVar("ServerT", bound="Server")
_log = logging.getLogger(__name__)
_JOIN_SECONDS = 5.0
"""The longest wait for the thread that cleans up after forgotten clients."""
_RECEIPTS_AT_ONCE = 1000
_REDEEMING_SECONDS = 5.0
"""The time limit of a call that redeems receipts."""


class Server(ABC):
    """A gRPC channel to one server, and the sockets beside it."""

    _channels: ClassVar[ChannelMaker]
    """gRPC's own kind of channels."""
    _connections: ClassVar[ConnectionKinds]
    """The connections to sockets."""

    def __init__(self, address: Address, target: int, settings: ConnectionSettings, memory: ClientMemory) -> None:
        self._settings = settings
        self._closed = False
        shown = CallCredentials.to(address, settings)
        self._channel = Channel(address, settings, shown, self._channels)
        self._sockets = Carrier(self._channel.route, target, settings, memory, shown, self._connections, self._ask)

    @property
    def info(self) -> TransportInfo:
        """The way that calls take."""
        return self._sockets.info

    async def carry(self, attempt: Attempt, watch: Watch | None = None) -> Any:
        """Makes a call; returns its answer.

        Args:
            attempt: The call.
            watch: Told what interrupts the call, from another thread. None: nothing does but closing, or the end of the
                task.
        """
        exchange, timeout, metadata = attempt
        match exchange:
            case Whole():
                reply = await self._call(exchange, timeout, metadata, watch)
                return NOT_CARRIED if reply is None else reply
            case Unary(only_over_grpc=True):
                return await self._ask(exchange, timeout, metadata, watch)
            case Unary():
                reply = await self._call(Whole(exchange), timeout, metadata, watch)
                return None if reply is None else reply.message
            case Upload():
                return await self._answer(self._put(exchange, timeout, metadata, watch))
            case Download():
                return await self._answer(self._get(exchange, timeout, metadata, watch))
            case Introduce():
                return await self._sockets.introduce(TimeLimit(timeout, self._settings), metadata, watch)

    async def close(self) -> None:
        """Ends calls under way with CallCancelledError, and disconnects."""
        self._closed = True
        self._sockets.close()
        for each in self._channel.opened:
            closing = each.close()
            if closing is not None:
                await closing

    def abandon(self) -> None:
        """Closes the sockets of a forgotten client, which has no calls; gRPC's channel closes itself."""
        self._sockets.close()

    async def _call(self, whole: Whole, timeout: float | None, metadata: Metadata, watch: Watch | None) -> Reply | None:
        if self._sockets.takes(metadata):
            limit = TimeLimit(timeout, self._settings)
            reply = await self._sockets.call(whole, limit, metadata, watch)
            if reply is not None:
                return reply
            timeout = limit.timeout()
        if not whole.over_grpc:
            return None
        return Reply(await self._answer(self._unary(whole.call, timeout, metadata, watch)))

    async def _ask(self, unary: Unary, timeout: float | None, metadata: Metadata, watch: Watch | None) -> Any:
        return await self._answer(self._unary(unary, timeout, metadata, watch))

    async def _answer(self, outcome: Awaitable[Any]) -> Any:
        """Returns the outcome of a call over gRPC; raises gRPC's errors as gradserve's."""
        try:
            return await outcome
        except grpc.RpcError as error:
            raise self._channel.failure(error, is_closed=self._closed) from None
        except grpc.aio.UsageError:
            raise closed() from None
        except ValueError:
            # Blocking channels raise this for a call on a closed channel, in words that depend on the kind of call.
            if self._closed:
                raise closed() from None
            raise
        except asyncio.CancelledError:
            # Closing the channel cancels its calls; the task that made this one must go on.
            if self._closed and not is_being_cancelled():
                raise closed() from None
            raise

    @abstractmethod
    def _unary(
        self, unary: Unary, timeout: float | None, metadata: Metadata, watch: Watch | None
    ) -> Coroutine[Any, Any, Any]:
        """Makes a unary call over gRPC; raises gRPC's errors."""

    @abstractmethod
    def _put(
        self, upload: Upload, timeout: float | None, metadata: Metadata, watch: Watch | None
    ) -> Coroutine[Any, Any, Any]:
        """Makes a PutTensors call; raises gRPC's errors."""

    @abstractmethod
    def _get(
        self, download: Download, timeout: float | None, metadata: Metadata, watch: Watch | None
    ) -> Coroutine[Any, Any, list[Array]]:
        """Makes a GetTensors call; raises gRPC's errors."""


def is_being_cancelled() -> bool:
    """Returns True if somebody has cancelled the current task, which a CancelledError from gRPC does not tell."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class LostReplies:
    """The receipts of a client's calls whose replies have not arrived; redeems them in the background.

    Many at a time: a client may give up thousands of calls at once. Safe to use from several threads.
    """

    def __init__(self, begin: Callable[[Callable[[], Operation[None]]], None]) -> None:
        self._begin = weakref.WeakMethod(begin)  # the client's; it must not be kept alive
        self._lock = threading.Lock()
        self._receipts: dict[int, list[bytes]] = {}

    def add(self, target: int, receipt: bytes) -> None:
        """Has a server delete what it has stored, or will store, with a receipt."""
        with self._lock:
            is_first = target not in self._receipts
            self._receipts.setdefault(target, []).append(receipt)
        begin = self._begin()
        if is_first and begin is not None:
            begin(partial(self._redeem, target))

    def _redeem(self, target: int) -> Operation[None]:
        while receipts := self._next(target):
            request = tensor_messages_pb2.DeleteTensorsRequest(receipts=receipts)
            call = Unary("TensorService", "DeleteTensors", request, at_most=_REDEEMING_SECONDS, target=target)
            try:
                yield Whole(call, repeat=Repeat.NEVER)
            except GradserveError:
                continue  # the server is not there: it has deleted what it could not send, or ends it with its lease

    def _next(self, target: int) -> list[bytes]:
        with self._lock:
            waiting = self._receipts[target]
            receipts, self._receipts[target] = waiting[:_RECEIPTS_AT_ONCE], waiting[_RECEIPTS_AT_ONCE:]
            if not receipts:
                del self._receipts[target]
            return receipts


class InBackground(Protocol):
    """An operation that runs in the background."""

    @property
    def is_done(self) -> bool:
        """True if the operation has ended."""
        ...

    def stop(self) -> None:
        """Stops the operation soon. Safe in any thread."""
        ...


class Network(ABC, Generic[ServerT]):
    """Runs the operations of one client. Safe in whatever threads or tasks the transport is used from."""

    def __init__(self, servers: type[ServerT], addresses: Sequence[Address], settings: ConnectionSettings) -> None:
        self._settings = settings
        self._contact = Contact(LostReplies(self._clean_up).add)
        self._pid = os.getpid()
        self._memory = ClientMemory(shares=settings.shares_memory, kept_bytes=settings.sockets.kept_bytes)
        self._servers = tuple(
            servers(address, target, settings, self._memory) for target, address in enumerate(addresses)
        )
        self._background: list[Any] = []
        self._clean_ups: list[Any] = []
        self._cleanup = Cleanup(self, partial(_abandon, self._background, self._servers))

    def _attempts(self, operation: Operation[T]) -> Attempts[T]:
        return attempts(operation, self._settings, self._contact)

    async def _run(self, operation: Operation[T]) -> T:
        self._check_process()
        return await drive(self._attempts(operation), self._perform)

    async def _close(self) -> None:
        self._check_process()
        for each in self._clean_ups:
            await self._join(each)
        _stop([*self._background, *self._clean_ups])
        for each in self._background:
            await self._join(each)
        for server in self._servers:
            await server.close()
        self._cleanup.call_off()

    async def _perform(self, step: Step) -> Any:
        """Returns the answer to a step of an operation."""
        match step:
            case Attempt(exchange):
                return await self._servers[exchange.target].carry(step)
            case Pause(seconds):
                return await self._pause(seconds)
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
            case Work(run):
                return await self._work(run)
            case Together(operations):
                return await self._run_together(operations)

    def _clean_up(self, begin: Callable[[], Operation[None]]) -> None:
        with suppress(RuntimeError):  # the interpreter or the event loop ends, and begins nothing any more
            self._begin(begin, self._clean_ups)

    def _begin(self, begin: Callable[[], Operation[None]], beside: list[Any]) -> None:
        beside[:] = [each for each in beside if not each.is_done]
        beside.append(self._in_background(begin))

    def _check_process(self) -> None:
        """Raises ForkedClientError in a fork, which has neither gRPC's threads nor sockets of its own."""
        if os.getpid() != self._pid:
            raise ForkedClientError(
                f"this client was connected in process {self._pid} and is used in its fork {os.getpid()}; "
                "connect after forking, or start workers with multiprocessing's 'spawn' method"
            )

    @abstractmethod
    async def _pause(self, seconds: float) -> None:
        """Waits."""

    @abstractmethod
    async def _work(self, run: Callable[[], Any]) -> Any:
        """Does work that blocks; returns its result."""

    @abstractmethod
    def _run_together(self, operations: Sequence[Operation[Any]]) -> Coroutine[Any, Any, list[Any]]:
        """Runs operations at the same time; returns their results, or raises the first error when all have ended."""

    @abstractmethod
    def _in_background(self, begin: Callable[[], Operation[None]]) -> InBackground:
        """Runs an operation in the background, for which the transport must not be referred to."""

    @abstractmethod
    async def _join(self, operation: Any) -> None:
        """Waits until an operation in the background has ended, for some seconds at most."""


def _abandon(background: Sequence[InBackground], servers: Sequence[Server]) -> None:
    _stop(background)
    for each in servers:
        each.abandon()


def _stop(background: Iterable[InBackground]) -> None:
    for each in background:
        each.stop()


class Cleanup:
    """Work to do after a client has been garbage-collected, unless it was closed before.

    The garbage collector interrupts any thread anywhere, which may hold any lock. So the finalizer only puts the work
    into a queue, and a thread does it. That lives as long as there are objects that may be forgotten.
    """

    def __init__(self, owner: object, work: Callable[[], object]) -> None:
        self._cleaner = _Cleaner.with_one_more()
        self._finalizer = weakref.finalize(owner, self._cleaner.put, work)
        self._finalizer.atexit = False

    def call_off(self) -> None:
        """Notes that the object was closed; ends the thread if it was the last one. Can be called again."""
        if self._finalizer.detach() is not None:
            self._cleaner.forgo()


class _Cleaner:
    """A thread, and the work that it has to do. When it expects no more, it ends, and the next object gets another."""

    _lock = threading.Lock()
    _present: "_Cleaner | None" = None

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._num_expected = 0
        self._due: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gradserve-cleanup", daemon=True)
        self._thread.start()

    @classmethod
    def with_one_more(cls) -> "_Cleaner":
        """Returns the present one, which expects one more piece of work."""
        with cls._lock:
            cls._present = cls._present or cls()
            cls._present._num_expected += 1
            return cls._present

    @classmethod
    def begin_anew(cls) -> None:
        """Leaves the objects of a process alone in its fork: the thread is not there, and what is open not its own."""
        cls._lock, cls._present = threading.Lock(), None

    def put(self, work: Callable[[], object]) -> None:
        """Takes work. Takes no lock, as a finalizer may call it; in a fork, drops the work."""
        if os.getpid() == self._pid:
            self._due.put(work)

    def forgo(self) -> None:
        """Expects one piece of work less; returns when the thread has ended, if that was the last one."""
        if self._is_over() and os.getpid() == self._pid:
            self._due.put(None)
            self._thread.join(_JOIN_SECONDS)

    def _is_over(self) -> bool:
        with self._lock:
            self._num_expected -= 1
            if self._num_expected:
                return False
            if _Cleaner._present is self:
                _Cleaner._present = None
            return True

    def _run(self) -> None:
        while (work := self._due.get()) is not None:
            try:
                work()
            except Exception:
                _log.exception("what a forgotten object has left could not be cleaned up")
            del work  # and what it refers to, before the next one comes
            if self._is_over():
                return


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Cleaner.begin_anew)
