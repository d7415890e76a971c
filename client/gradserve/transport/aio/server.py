"""The connection of the asyncio transport to one server: a gRPC channel, and sockets beside it."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from gradserve.calls.exchange import NOT_CARRIED, Download, Introduce, Progress, Reply, Unary, Upload, Whole
from gradserve.calls.retries import Attempt
from gradserve.errors import DeadlineExceededError, UnavailableError
from gradserve.results import TransportInfo
from gradserve.transport.channel import CallCredentials, Channel, closed
from gradserve.transport.driving import drive_async
from gradserve.transport.route import Route
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.sockets.aio import AsyncConnection, SecureAsyncConnection
from gradserve.transport.sockets.carrier import AddStrands, AskForTicket, Carrier, CarrierStep, Connect
from gradserve.transport.sockets.choice import Place
from gradserve.transport.sockets.connection import TimeLimit, silent
from gradserve.transport.sockets.conversation import call
from gradserve.transport.streams import DownloadParts, UploadParts
from gradserve_protocol.address import Address
from gradserve_protocol.arrays import Array
from gradserve_protocol.frames import Metadata
from gradserve_protocol.memory.regions import ClientMemory
from gradserve_protocol.v1 import server_messages_pb2

_NO_STATUS = "Internal error from Core"
"""gRPC's words instead of the status of a stream, if the server ends it while a message is being sent."""


class AsyncServer:
    """A gRPC channel to a server, and the sockets beside it."""

    def __init__(self, address: Address, target: int, settings: ConnectionSettings, memory: ClientMemory) -> None:
        self._settings = settings
        self._closed = False
        self._unclaimed: set[asyncio.Task[Any]] = set()
        shown = CallCredentials.to(address, settings)
        self._channel = Channel(address, settings, shown, grpc.aio)
        self._sockets = AsyncSockets(self._channel.route, target, settings, memory, shown, self._ask)

    @property
    def info(self) -> TransportInfo:
        """The way that calls take."""
        return self._sockets.info

    async def carry(self, attempt: Attempt) -> Any:
        """Makes a call; returns its answer."""
        match attempt:
            case Attempt(Upload() as upload, timeout, metadata):
                return await self._answer(self._put(upload, timeout, metadata))
            case Attempt(Download(request) as download, timeout, metadata):
                call = self._channel.now.get(request, timeout=timeout, metadata=metadata)
                return await self._answer(_read(call, download.progress))
            case Attempt(Introduce(), timeout, metadata):
                return await self._sockets.introduce(TimeLimit(timeout, self._settings), metadata)
            case Attempt(Whole() as whole, timeout, metadata):
                reply = await self._call(whole, timeout, metadata)
                return NOT_CARRIED if reply is None else reply
            case Attempt(Unary() as call, timeout, metadata):
                reply = await self._call(Whole(call), timeout, metadata)
                return None if reply is None else reply.message

    async def call_over_grpc(self, unary: Unary, timeout: float | None, metadata: Metadata = ()) -> Any:
        """Makes a unary call over gRPC, and raises gRPC's errors."""
        call = self._channel.now.unary(unary.service, unary.method)
        return await call(unary.request, timeout=timeout, metadata=metadata)

    async def close(self) -> None:
        """Ends calls under way with CallCancelledError, and disconnects."""
        self._closed = True
        self._sockets.close()
        for each in self._channel.opened:
            await each.close()

    def abandon(self) -> None:
        """Closes the sockets of a forgotten client, which has no calls; gRPC's channel closes itself."""
        self._sockets.close()

    async def _call(self, whole: Whole, timeout: float | None, metadata: Metadata) -> Reply | None:
        limit = TimeLimit(timeout, self._settings)
        reply = await self._sockets.call(whole, limit, metadata)
        if reply is None and whole.over_grpc:
            return Reply(await self._answer(self.call_over_grpc(whole.call, limit.timeout(), metadata)))
        return reply

    async def _ask(self, unary: Unary, timeout: float | None, metadata: Metadata) -> Any:
        return await self._answer(self.call_over_grpc(unary, timeout, metadata))

    async def _put(self, upload: Upload, timeout: float | None, metadata: Metadata) -> Any:
        parts = UploadParts(upload)
        call = self._channel.now.put(iter(parts), timeout=timeout, metadata=metadata)
        response = asyncio.ensure_future(_response(call, upload.progress))
        try:
            return await asyncio.shield(response)
        except asyncio.CancelledError:
            if not parts.is_complete:
                response.cancel()
            # Otherwise the server may have stored everything already, and says under which handles.
            self._unclaimed.add(response)
            response.add_done_callback(self._unclaimed.discard)
            response.add_done_callback(partial(_leave, upload))
            raise
        finally:
            del response  # a cycle: the traceback of its error has this frame, and the arrays

    async def _answer(self, outcome: Awaitable[Any]) -> Any:
        """Returns the outcome of a call over gRPC; raises gRPC's errors as gradserve's."""
        try:
            return await outcome
        except grpc.RpcError as error:
            raise self._channel.failure(error, is_closed=self._closed) from None
        except grpc.aio.UsageError:
            raise closed() from None
        except asyncio.CancelledError:
            # Closing the channel cancels its calls; the task that made this one must go on.
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):
                raise closed() from None
            raise


def _leave(upload: Upload, response: asyncio.Task[Any]) -> None:
    """Tells an upload whose wait was interrupted of the response, if there is one."""
    if not response.cancelled() and response.exception() is None and upload.unclaimed is not None:
        upload.unclaimed(response.result())


async def _response(call: Any, progress: Progress | None = None) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        if error.details() == _NO_STATUS:
            raise UnavailableError(
                "the server ended the upload before it had all of it; gRPC lost the reason"
            ) from None
        raise
    except asyncio.CancelledError:
        if progress is not None and progress.failure is not None:
            raise progress.failure from None  # of which gRPC says only that it has cancelled the call
        raise


async def _read(call: Any, progress: Progress | None) -> list[Array]:
    parts = DownloadParts(progress)
    try:
        async for part in call:
            parts.add(part)
    finally:
        call.cancel()
    return parts.finish()


class AsyncSockets:
    """Calls over sockets, in the awaiting task."""

    def __init__(
        self,
        route: Route,
        target: int,
        settings: ConnectionSettings,
        memory: ClientMemory,
        shown: CallCredentials,
        over_grpc: Callable[[Unary, float | None, Metadata], Awaitable[Any]],
    ) -> None:
        """Takes the route to the server, its index, the client's settings and memory, and what calls over gRPC show.

        `over_grpc` takes a call, its time limit, None for none, and its metadata; returns the response or raises a
        GradserveError.
        """
        self._carrier: Carrier[AsyncConnection] = Carrier(route, target, settings, memory, shown)
        self._target = target
        self._settings = settings
        self._over_grpc = over_grpc

    @property
    def info(self) -> TransportInfo:
        """The way in use."""
        return self._carrier.info

    async def call(self, whole: Whole, limit: TimeLimit, metadata: Metadata) -> Reply | None:
        """Makes a call; returns None if gRPC has to carry it.

        Args:
            whole: The call.
            limit: Its time limit.
            metadata: What it carries beside its request, if the server takes that.
        """
        if not self._carrier.takes(metadata):
            return None
        connection = self._carrier.idle() or await drive_async(self._carrier.connect(limit, metadata), self._perform)
        if connection is None:
            return None
        try:
            if connection.wants_strands(whole.num_bytes):
                await drive_async(self._carrier.widen(connection), self._perform)
            taken = metadata if connection.takes_metadata else ()
            conversation = call(
                whole, limit.left(), connection.payloads, connection.inbox, connection.num_strands, taken
            )
            outcome = await connection.converse(conversation, limit, partial(self._probe, metadata))
        except BaseException as error:
            self._carrier.failed(connection, error)
            raise
        return self._carrier.answered(connection, outcome)

    async def introduce(self, limit: TimeLimit, metadata: Metadata) -> str | None:
        """Shows the user of this client to the server; see `Introduce`."""
        return await drive_async(self._carrier.introduce(limit, metadata), self._perform)

    def close(self) -> None:
        """Closes the connections; calls under way end with CallCancelledError."""
        self._carrier.connections.close()

    async def _perform(self, step: CarrierStep) -> Any:
        match step:
            case AskForTicket(question, limit, metadata):
                return await self._over_grpc(question, limit.timeout(), metadata)
            case AddStrands(connection, number):
                return await connection.add_strands(number)
            case Connect():
                return await self._kind_of(step.place).open(step, self._settings)

    def _kind_of(self, place: Place) -> type[AsyncConnection]:
        is_plain = place.path or self._settings.certificates is None
        return AsyncConnection if is_plain else SecureAsyncConnection

    async def _probe(self, metadata: Metadata, place: Place) -> None:
        question = Unary(
            "ServerService", "GetServerInfo", server_messages_pb2.GetServerInfoRequest(), target=self._target
        )
        try:
            await self._over_grpc(question, self._settings.keepalive.timeout, metadata)
        except (DeadlineExceededError, UnavailableError) as error:
            raise silent(place, error) from None
