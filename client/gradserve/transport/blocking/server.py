"""The connection of the blocking transport to one server: a gRPC channel, and sockets beside it."""

import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from gradserve.calls.exchange import NOT_CARRIED, Download, Introduce, Progress, Reply, Unary, Upload, Whole
from gradserve.calls.retries import Attempt
from gradserve.errors import DeadlineExceededError, UnavailableError
from gradserve.results import TransportInfo
from gradserve.transport.channel import CallCredentials, Channel, closed
from gradserve.transport.driving import drive
from gradserve.transport.route import Route
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.sockets.blocking import BlockingConnection, SecureBlockingConnection
from gradserve.transport.sockets.carrier import AddStrands, AskForTicket, Carrier, CarrierStep, Connect
from gradserve.transport.sockets.choice import Place
from gradserve.transport.sockets.connection import TimeLimit, silent
from gradserve.transport.sockets.conversation import call
from gradserve.transport.streams import DownloadParts, UploadParts
from gradserve_protocol.address import Address
from gradserve_protocol.arrays import Array
from gradserve_protocol.frames import Metadata
from gradserve_protocol.memory.regions import ClientMemory
from gradserve_protocol.tensors import Chunk
from gradserve_protocol.v1 import server_messages_pb2
from gradserve_protocol.v1 import tensor_messages_pb2 as messages_pb2

Watch = Callable[[Callable[[], object]], object]
"""A function that is told what interrupts the call that begins now, and nothing once that has ended."""


class BlockingServer:
    """A gRPC channel to a server, and the sockets beside it. Safe to use from several threads."""

    def __init__(self, address: Address, target: int, settings: ConnectionSettings, memory: ClientMemory) -> None:
        self._settings = settings
        self._closed = False
        shown = CallCredentials.to(address, settings)
        self._channel = Channel(address, settings, shown, grpc)
        self._sockets = BlockingSockets(self._channel.route, target, settings, memory, shown, self._ask)

    @property
    def info(self) -> TransportInfo:
        """The way that calls take."""
        return self._sockets.info

    def carry(self, attempt: Attempt, watch: Watch | None) -> Any:
        """Makes a call and waits for it in this thread; returns its answer.

        Args:
            attempt: The call.
            watch: Told what interrupts the call, from another thread. None: nothing does but closing.
        """
        exchange, timeout, metadata = attempt
        match exchange:
            case Whole():
                reply = self._call(exchange, timeout, metadata, watch)
                return NOT_CARRIED if reply is None else reply
            case Unary():
                reply = self._call(Whole(exchange), timeout, metadata, watch)
                return None if reply is None else reply.message
            case Upload() | Download():
                return self._answer(lambda: self._stream(exchange, timeout, metadata, watch))
            case Introduce():
                return self._sockets.introduce(TimeLimit(timeout, self._settings), metadata)

    def start_over_grpc(self, unary: Unary, timeout: float | None, metadata: Metadata = ()) -> Any:
        """Starts a unary call over gRPC; returns gRPC's future for it."""
        call = self._channel.now.unary(unary.service, unary.method)
        return call.future(unary.request, timeout=timeout, metadata=metadata)

    def close(self) -> None:
        """Ends calls under way in other threads with CallCancelledError, and disconnects."""
        self._closed = True
        self._sockets.close()
        for each in self._channel.opened:
            each.close()

    def abandon(self) -> None:
        """Closes the sockets of a forgotten client, which has no calls; gRPC's channel closes itself."""
        self._sockets.close()

    def _call(self, whole: Whole, timeout: float | None, metadata: Metadata, watch: Watch | None) -> Reply | None:
        limit = TimeLimit(timeout, self._settings)
        reply = self._sockets.call(whole, limit, metadata, watch)
        if reply is None and whole.over_grpc:
            return Reply(self._answer(lambda: self._unary(whole.call, limit.timeout(), metadata, watch)))
        return reply

    def _ask(self, unary: Unary, timeout: float | None, metadata: Metadata) -> Any:
        return self._answer(lambda: self._unary(unary, timeout, metadata, None))

    def _unary(self, unary: Unary, timeout: float | None, metadata: Metadata, watch: Watch | None) -> Any:
        if watch is None:
            # Waiting in this thread is faster than waiting for a future.
            call = self._channel.now.unary(unary.service, unary.method)
            return call(unary.request, timeout=timeout, metadata=metadata)
        return _result(self.start_over_grpc(unary, timeout, metadata), watch)

    def _stream(
        self, exchange: Upload | Download, timeout: float | None, metadata: Metadata, watch: Watch | None
    ) -> Any:
        match exchange:
            case Upload():
                put = self._channel.now.put
                if exchange.progress is not None:
                    return ReportedUpload(exchange, exchange.progress).run(put, timeout, metadata, watch)
                return carry_upload(exchange, put, timeout, metadata, watch)
            case Download(request):
                call = self._channel.now.get(request, timeout=timeout, metadata=metadata)
                if watch is not None:
                    watch(call.cancel)
                return _read(call, exchange.progress)

    def _answer(self, outcome: Callable[[], Any]) -> Any:
        """Returns the outcome of a call over gRPC; raises gRPC's errors as gradserve's."""
        try:
            return outcome()
        except grpc.RpcError as error:
            raise self._channel.failure(error, is_closed=self._closed) from None
        except ValueError:
            # gRPC raises this for a call on a closed channel, in words that depend on the kind of call.
            if self._closed:
                raise closed() from None
            raise


def _result(future: Any, watch: Watch) -> Any:
    watch(future.cancel)
    return future.result()


def _read(call: Any, progress: Progress | None) -> list[Array]:
    parts = DownloadParts(progress)
    try:
        for part in call:
            parts.add(part)
    finally:
        call.cancel()
    return parts.finish()


class BlockingSockets:
    """Calls over sockets, in the calling thread."""

    def __init__(
        self,
        route: Route,
        target: int,
        settings: ConnectionSettings,
        memory: ClientMemory,
        shown: CallCredentials,
        over_grpc: Callable[[Unary, float | None, Metadata], Any],
    ) -> None:
        """Takes the route to the server, its index, the client's settings and memory, and what calls over gRPC show.

        `over_grpc` takes a call, its time limit, None for none, and its metadata; returns the response or raises a
        GradserveError.
        """
        self._carrier: Carrier[BlockingConnection] = Carrier(route, target, settings, memory, shown)
        self._target = target
        self._settings = settings
        self._over_grpc = over_grpc

    @property
    def info(self) -> TransportInfo:
        """The way in use."""
        return self._carrier.info

    def call(self, whole: Whole, limit: TimeLimit, metadata: Metadata, watch: Watch | None) -> Reply | None:
        """Makes a call; returns None if gRPC has to carry it.

        Args:
            whole: The call.
            limit: Its time limit.
            metadata: What it carries beside its request, if the server takes that.
            watch: Told what interrupts the call, from another thread. None: nothing does but closing.
        """
        if not self._carrier.takes(metadata):
            return None
        connection = self._carrier.idle() or drive(self._carrier.connect(limit, metadata), self._perform)
        if connection is None:
            return None
        try:
            if watch is not None:
                watch(self._carrier.connections.interruption(connection))
            if connection.wants_strands(whole.num_bytes):
                drive(self._carrier.widen(connection), self._perform)
            taken = metadata if connection.takes_metadata else ()
            conversation = call(
                whole, limit.left(), connection.payloads, connection.inbox, connection.num_strands, taken
            )
            outcome = connection.converse(conversation, limit, partial(self._probe, metadata))
        except BaseException as error:
            self._carrier.failed(connection, error)
            raise
        return self._carrier.answered(connection, outcome)

    def introduce(self, limit: TimeLimit, metadata: Metadata) -> str | None:
        """Shows the user of this client to the server; see `Introduce`."""
        return drive(self._carrier.introduce(limit, metadata), self._perform)

    def close(self) -> None:
        """Closes the connections; calls under way in other threads end with CallCancelledError."""
        self._carrier.connections.close()

    def _perform(self, step: CarrierStep) -> Any:
        match step:
            case AskForTicket(question, limit, metadata):
                return self._over_grpc(question, limit.timeout(), metadata)
            case AddStrands(connection, number):
                return connection.add_strands(number)
            case Connect():
                return self._kind_of(step.place).open(step, self._settings)

    def _kind_of(self, place: Place) -> type[BlockingConnection]:
        is_plain = place.path or self._settings.certificates is None
        return BlockingConnection if is_plain else SecureBlockingConnection

    def _probe(self, metadata: Metadata, place: Place) -> None:
        question = Unary(
            "ServerService", "GetServerInfo", server_messages_pb2.GetServerInfoRequest(), target=self._target
        )
        try:
            self._over_grpc(question, self._settings.keepalive.timeout, metadata)
        except (DeadlineExceededError, UnavailableError) as error:
            raise silent(place, error) from None


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
        _end(upload, future, is_complete=parts.is_complete)
        may_begin.put(False)


class ReportedUpload:
    """An upload whose progress is told in the calling thread. gRPC's thread waits until that has been done.

    So an upload whose callback raises an exception is incomplete, and the server keeps nothing of it.
    """

    def __init__(self, upload: Upload, progress: Progress) -> None:
        self._upload = upload
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
            _end(self._upload, future, is_complete=self._chunks.is_complete)
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


def _end(upload: Upload, future: Any, *, is_complete: bool) -> None:
    """Ends the call of an upload whose thread waits no more: an exception from outside may have ended the wait.

    Args:
        upload: The upload.
        future: gRPC's future of the call; None if the exception came before gRPC had returned it.
        is_complete: Whether gRPC has all of it. The server may have stored it then, so what it says is waited for in
            the background.
    """
    if future is None:
        return
    if not is_complete or upload.unclaimed is None:
        future.cancel()
    elif not future.done():
        future.add_done_callback(partial(_tell, upload.unclaimed))


def _tell(unclaimed: Callable[[messages_pb2.PutTensorsResponse], object], future: Any) -> None:
    if not future.cancelled() and future.exception() is None:
        unclaimed(future.result())
