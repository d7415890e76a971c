"""One server, as the blocking transport reaches it."""

from collections.abc import Callable
from typing import Any

import grpc

from gradserve.address import Address
from gradserve.calls.exchange import NOT_CARRIED, Download, Introduce, Reply, Unary, Upload, Whole
from gradserve.calls.progress import Progress
from gradserve.calls.retries import Attempt
from gradserve.memory.regions import ClientMemory
from gradserve.results import TransportInfo
from gradserve.transport.blocking.sockets import BlockingSockets, Watch
from gradserve.transport.blocking.uploading import ReportedUpload, carry_upload
from gradserve.transport.channel import closed, make_channel
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.shown import Shown
from gradserve.transport.sockets.time_limit import TimeLimit
from gradserve.transport.streams import DownloadParts
from gradserve.wire.arrays import Array
from gradserve.wire.frames import Metadata


class BlockingServer:
    """A gRPC channel to a server, and the sockets beside it. Safe to use from several threads."""

    def __init__(self, address: Address, target: int, settings: ConnectionSettings, memory: ClientMemory) -> None:
        """Takes the server's address, its index among those of the transport, and the client's settings and memory."""
        self._settings = settings
        self._closed = False
        shown = Shown.to(address, settings)
        self._channel = make_channel(address, settings, shown, grpc)
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
                return self._sockets.introduce(TimeLimit(timeout, self._settings))

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

    def _ask(self, unary: Unary, timeout: float | None) -> Any:
        return self._answer(lambda: self._unary(unary, timeout, (), None))

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
