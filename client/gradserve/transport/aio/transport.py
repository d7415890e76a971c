"""Carries operations out over gRPC channels, with asyncio."""

import asyncio
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import grpc

from gradserve.address import Address
from gradserve.calls.exchange import Background, Download, Operation, Pause, Together, Unary, Upload
from gradserve.calls.retries import Attempt, Attempts, Step
from gradserve.transport.aio.background import BackgroundTask
from gradserve.transport.aio.together import ConcurrentSteps
from gradserve.transport.carrying import attempts, carry_out_async
from gradserve.transport.channel import Channel, closed
from gradserve.transport.process import OwnProcess
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.streams import DownloadParts, upload_parts
from gradserve.wire.payload import Array

T = TypeVar("T")


class AsyncGrpcTransport:
    """Runs operations on the event loop in which it is made."""

    def __init__(self, addresses: Sequence[Address], settings: ConnectionSettings) -> None:
        """Takes the servers' addresses, in the order of exchanges' targets, and the settings."""
        self._settings = settings
        self._process = OwnProcess()
        self._closed = False
        self._channels = tuple(Channel(address, settings, grpc.aio.insecure_channel) for address in addresses)
        self._background: list[BackgroundTask] = []
        weakref.finalize(self, _stop, self._background).atexit = False

    async def run(self, operation: Operation[T], /) -> T:
        """Returns the result of an operation, or raises its error."""
        self._process.check()
        return await carry_out_async(self._attempts(operation), self._perform)

    async def close(self) -> None:
        """Closes the channels; calls under way end with CallCancelledError."""
        self._process.check()
        self._closed = True
        _stop(self._background)
        for each in self._background:
            await each.join()
        for channel in self._channels:
            await channel.close()

    def _attempts(self, operation: Operation[T]) -> Attempts[T]:
        return attempts(operation, self._settings)

    async def _perform(self, step: Step) -> Any:
        match step:
            case Attempt():
                return await self._call(step, self._channels[step.exchange.target])
            case Pause(seconds):
                return await asyncio.sleep(seconds)
            case Background(begin):
                return self._begin(begin())
            case Together(operations):
                return await ConcurrentSteps(self._perform, self._attempts).run(operations)

    async def _call(self, attempt: Attempt, channel: Channel) -> Any:
        try:
            match attempt:
                case Attempt(Unary(service, method, request), timeout):
                    return await channel.unary(service, method)(request, timeout=timeout)
                case Attempt(Upload() as upload, timeout):
                    return await channel.put(upload_parts(upload), timeout=timeout)
                case Attempt(Download(request), timeout):
                    return await _read(channel.get(request, timeout=timeout))
        except grpc.RpcError as error:
            raise channel.failure(error, is_closed=self._closed) from None
        except grpc.aio.UsageError:
            raise closed() from None
        except asyncio.CancelledError:
            # Closing the channel cancels its calls; the task that made this one must go on.
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):
                raise closed() from None
            raise

    def _begin(self, operation: Operation[None]) -> None:
        channels = self._channels

        async def call(exchange: Unary, timeout: float | None) -> Any:
            unary = channels[exchange.target].unary(exchange.service, exchange.method)
            return await unary(exchange.request, timeout=timeout)

        self._background[:] = [each for each in self._background if not each.is_done]
        self._background.append(BackgroundTask(operation, self._settings, call))


async def _read(call: Any) -> list[Array]:
    parts = DownloadParts()
    try:
        async for part in call:
            parts.add(part)
    finally:
        call.cancel()
    return parts.finish()


def _stop(background: Sequence[BackgroundTask]) -> None:
    for each in background:
        each.stop()
