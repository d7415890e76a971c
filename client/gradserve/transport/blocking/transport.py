"""Carries operations out over gRPC channels, blocking."""

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc

from gradserve.address import Address
from gradserve.calls.exchange import Background, Download, Operation, Pause, Together, Unary, Upload
from gradserve.calls.retries import Attempt, Attempts, Step
from gradserve.transport.blocking.background import BackgroundThread
from gradserve.transport.blocking.together import ConcurrentSteps
from gradserve.transport.carrying import attempts, carry_out
from gradserve.transport.channel import Channel, closed
from gradserve.transport.process import OwnProcess
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.streams import DownloadParts, upload_parts
from gradserve.wire.payload import Array

T = TypeVar("T")


class GrpcTransport:
    """Runs operations in the calling thread. Safe to use from several threads."""

    def __init__(self, addresses: Sequence[Address], settings: ConnectionSettings) -> None:
        """Takes the servers' addresses, in the order of exchanges' targets, and the settings."""
        self._settings = settings
        self._process = OwnProcess()
        self._closed = False
        self._channels = tuple(Channel(address, settings, grpc.insecure_channel) for address in addresses)
        self._background: list[BackgroundThread] = []
        weakref.finalize(self, _stop, self._background).atexit = False

    def run(self, operation: Operation[T], /) -> T:
        """Returns the result of an operation, or raises its error."""
        self._process.check()
        return carry_out(self._attempts(operation), self._perform)

    def close(self) -> None:
        """Closes the channels; calls under way in other threads end with CallCancelledError."""
        self._process.check()
        self._closed = True
        _stop(self._background)
        for each in self._background:
            each.join()
        for channel in self._channels:
            channel.close()

    def start(self, attempt: Attempt, /) -> Any:
        """Starts a call; returns gRPC's object for it, which is a future for a unary call or an upload."""
        channel = self._channels[attempt.exchange.target]
        match attempt:
            case Attempt(Unary(service, method, request), timeout):
                return channel.unary(service, method).future(request, timeout=timeout)
            case Attempt(Upload() as upload, timeout):
                return channel.put.future(upload_parts(upload), timeout=timeout)
            case Attempt(Download(request), timeout):
                return channel.get(request, timeout=timeout)

    def read(self, call: Any, /) -> list[Array]:
        """Returns the arrays of a download."""
        parts = DownloadParts()
        try:
            for part in call:
                parts.add(part)
        finally:
            call.cancel()
        return parts.finish()

    def answer(self, attempt: Attempt, outcome: Callable[[], Any], /) -> Any:
        """Returns the answer to an attempt; raises gRPC's errors as gradserve's."""
        try:
            return outcome()
        except grpc.RpcError as error:
            raise self._channels[attempt.exchange.target].failure(error, is_closed=self._closed) from None
        except ValueError:
            # gRPC raises this for a call on a closed channel, in words that depend on the kind of call.
            if self._closed:
                raise closed() from None
            raise

    def begin(self, operation: Operation[None], /) -> None:
        """Runs an operation in the background."""
        channels = self._channels

        def start_call(exchange: Unary, timeout: float | None) -> Any:
            unary = channels[exchange.target].unary(exchange.service, exchange.method)
            return unary.future(exchange.request, timeout=timeout)

        self._background[:] = [each for each in self._background if not each.is_done]
        self._background.append(BackgroundThread(operation, self._settings, start_call))

    def _attempts(self, operation: Operation[T]) -> Attempts[T]:
        return attempts(operation, self._settings)

    def _perform(self, step: Step) -> Any:
        match step:
            case Attempt():
                return self.answer(step, partial(self._call, step))
            case Pause(seconds):
                return time.sleep(seconds)
            case Background(begin):
                return self.begin(begin())
            case Together(operations):
                return ConcurrentSteps(self, self._attempts).run(operations)

    def _call(self, attempt: Attempt) -> Any:
        """Makes a call and waits for it in this thread, which is faster than waiting for a future."""
        channel = self._channels[attempt.exchange.target]
        match attempt:
            case Attempt(Unary(service, method, request), timeout):
                return channel.unary(service, method)(request, timeout=timeout)
            case Attempt(Upload() as upload, timeout):
                return channel.put(upload_parts(upload), timeout=timeout)
        return self.read(self.start(attempt))


def _stop(background: Sequence[BackgroundThread]) -> None:
    for each in background:
        each.stop()
