"""Carries operations out over a gRPC channel, blocking."""

import time
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import grpc

from gradserve.address import Address
from gradserve.calls.exchange import Background, Download, Operation, Pause, Unary, Upload
from gradserve.calls.retries import Attempt
from gradserve.transport.blocking.background import BackgroundThread
from gradserve.transport.carrying import attempts, carry_out
from gradserve.transport.channel import Channel, closed
from gradserve.transport.process import OwnProcess
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.streams import DownloadParts, upload_parts
from gradserve.wire.payload import Array

T = TypeVar("T")


class GrpcTransport:
    """Runs operations in the calling thread. Safe to use from several threads."""

    def __init__(self, address: Address, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._process = OwnProcess()
        self._closed = False
        self._channel = Channel(address, settings, grpc.insecure_channel)
        self._background: list[BackgroundThread] = []
        weakref.finalize(self, _stop, self._background).atexit = False

    def run(self, operation: Operation[T], /) -> T:
        """Returns the result of an operation, or raises its error."""
        self._process.check()
        return carry_out(attempts(operation, self._settings), self._perform)

    def close(self) -> None:
        """Closes the channel; calls under way in other threads end with CallCancelledError."""
        self._process.check()
        self._closed = True
        _stop(self._background)
        for each in self._background:
            each.join()
        self._channel.close()

    def _perform(self, step: Attempt | Pause | Background) -> Any:
        try:
            match step:
                case Attempt(Unary(service, method, request), timeout):
                    return self._channel.unary(service, method)(request, timeout=timeout)
                case Attempt(Upload() as upload, timeout):
                    return self._channel.put(upload_parts(upload), timeout=timeout)
                case Attempt(Download(request), timeout):
                    return self._download(request, timeout)
                case Pause(seconds):
                    return time.sleep(seconds)
                case Background(begin):
                    return self._begin(begin())
        except grpc.RpcError as error:
            raise self._channel.failure(error, is_closed=self._closed) from None
        except ValueError:
            # What gRPC raises for a call on a closed channel; its words depend on the kind of call.
            if self._closed:
                raise closed() from None
            raise

    def _download(self, request: Any, timeout: float | None) -> list[Array]:
        parts = DownloadParts()
        call = self._channel.get(request, timeout=timeout)
        try:
            for part in call:
                parts.add(part)
        finally:
            call.cancel()
        return parts.finish()

    def _begin(self, operation: Operation[None]) -> None:
        unary = self._channel.unary

        def start_call(exchange: Unary, timeout: float | None) -> Any:
            return unary(exchange.service, exchange.method).future(exchange.request, timeout=timeout)

        self._background[:] = [each for each in self._background if not each.is_done]
        self._background.append(BackgroundThread(operation, self._settings, start_call))


def _stop(background: Sequence[BackgroundThread]) -> None:
    for each in background:
        each.stop()
