"""Carries operations out over a gRPC channel, with asyncio."""

import asyncio
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import grpc

from gradserve.address import Address
from gradserve.calls.exchange import Background, Download, Operation, Pause, Unary, Upload
from gradserve.calls.retries import Attempt
from gradserve.transport.aio.background import BackgroundTask
from gradserve.transport.carrying import attempts, carry_out_async
from gradserve.transport.channel import Channel, closed
from gradserve.transport.process import OwnProcess
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.streams import DownloadParts, upload_parts
from gradserve.wire.payload import Array

T = TypeVar("T")


class AsyncGrpcTransport:
    """Runs operations on the event loop it was made on."""

    def __init__(self, address: Address, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._process = OwnProcess()
        self._closed = False
        self._channel = Channel(address, settings, grpc.aio.insecure_channel)
        self._background: list[BackgroundTask] = []
        weakref.finalize(self, _stop, self._background).atexit = False

    async def run(self, operation: Operation[T], /) -> T:
        """Returns the result of an operation, or raises its error."""
        self._process.check()
        return await carry_out_async(attempts(operation, self._settings), self._perform)

    async def close(self) -> None:
        """Closes the channel; calls under way end with CallCancelledError."""
        self._process.check()
        self._closed = True
        _stop(self._background)
        for each in self._background:
            await each.join()
        await self._channel.close()

    async def _perform(self, step: Attempt | Pause | Background) -> Any:
        try:
            match step:
                case Attempt(Unary(service, method, request), timeout):
                    return await self._channel.unary(service, method)(request, timeout=timeout)
                case Attempt(Upload() as upload, timeout):
                    return await self._channel.put(upload_parts(upload), timeout=timeout)
                case Attempt(Download(request), timeout):
                    return await self._download(request, timeout)
                case Pause(seconds):
                    return await asyncio.sleep(seconds)
                case Background(begin):
                    return self._begin(begin())
        except grpc.RpcError as error:
            raise self._channel.failure(error, is_closed=self._closed) from None
        except grpc.aio.UsageError:
            raise closed() from None
        except asyncio.CancelledError:
            # The channel cancels its calls when it is closed; the task that made this one goes on.
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):
                raise closed() from None
            raise

    async def _download(self, request: Any, timeout: float | None) -> list[Array]:
        parts = DownloadParts()
        call = self._channel.get(request, timeout=timeout)
        try:
            async for part in call:
                parts.add(part)
        finally:
            call.cancel()
        return parts.finish()

    def _begin(self, operation: Operation[None]) -> None:
        unary = self._channel.unary

        async def call(exchange: Unary, timeout: float | None) -> Any:
            return await unary(exchange.service, exchange.method)(exchange.request, timeout=timeout)

        self._background[:] = [each for each in self._background if not each.is_done]
        self._background.append(BackgroundTask(operation, self._settings, call))


def _stop(background: Sequence[BackgroundTask]) -> None:
    for each in background:
        each.stop()
