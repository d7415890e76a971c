"""Carries operations out over a gRPC channel: blocking, and with asyncio."""

import asyncio
import functools
import time
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import grpc

from gradserve.address import Address
from gradserve.background import BackgroundTask, BackgroundThread
from gradserve.calls import methods
from gradserve.calls.exchange import Background, Download, Operation, Pause, Unary, Upload
from gradserve.calls.retries import Attempt, with_retries
from gradserve.calls.status import error_from_status, explain
from gradserve.calls.streams import DownloadParts, upload_parts
from gradserve.errors import CallCancelledError, GradserveError
from gradserve.process import OwnProcess
from gradserve.route import Route
from gradserve.wire.payload import Array

T = TypeVar("T")

DEFAULT_TIMEOUT_SECONDS = 60.0


class SyncTransport:
    """Runs operations in the calling thread. Safe to use from several threads."""

    def __init__(self, address: Address, timeout: float) -> None:
        self._route = Route.to(address)
        self._timeout = timeout
        self._process = OwnProcess()
        self._closed = False
        options = (*methods.CHANNEL_OPTIONS, *self._route.options)
        self._channel = grpc.insecure_channel(address.target, options=options)
        put, get = methods.PUT_TENSORS, methods.GET_TENSORS
        self._put = self._channel.stream_unary(put.path, put.encode, put.decode)
        self._get = self._channel.unary_stream(get.path, get.encode, get.decode)
        self._unary = functools.cache(functools.partial(_make_unary, self._channel))
        self._background: list[BackgroundThread] = []
        weakref.finalize(self, _stop, self._background).atexit = False

    def run(self, operation: Operation[T]) -> T:
        """Returns the result of an operation, or raises its error."""
        self._process.check()
        attempts = with_retries(operation, self._timeout)
        try:
            step = next(attempts)
            while True:
                try:
                    answer = self._perform(step)
                except GradserveError as error:
                    step = attempts.throw(error)
                else:
                    step = attempts.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            attempts.close()  # at once also where it was cancelled or interrupted

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
                    return self._unary(service, method)(request, timeout=timeout)
                case Attempt(Upload() as upload, timeout):
                    return self._put(upload_parts(upload), timeout=timeout)
                case Attempt(Download(request), timeout):
                    return self._download(request, timeout)
                case Pause(seconds):
                    return time.sleep(seconds)
                case Background(begin):
                    return self._begin(begin())
        except grpc.RpcError as error:
            raise _failure(error, self._route, self._closed) from None
        except ValueError:
            # What gRPC raises for a call on a closed channel; its words depend on the kind of call.
            if self._closed:
                raise _closed() from None
            raise

    def _download(self, request: Any, timeout: float | None) -> list[Array]:
        parts = DownloadParts()
        call = self._get(request, timeout=timeout)
        try:
            for part in call:
                parts.add(part)
        finally:
            call.cancel()
        return parts.finish()

    def _begin(self, operation: Operation[None]) -> None:
        unary = self._unary

        def start_call(exchange: Unary, timeout: float | None) -> Any:
            return unary(exchange.service, exchange.method).future(exchange.request, timeout=timeout)

        self._background[:] = [each for each in self._background if not each.is_done]
        self._background.append(BackgroundThread(operation, self._timeout, start_call))


class AsyncTransport:
    """Runs operations on the event loop it was made on."""

    def __init__(self, address: Address, timeout: float) -> None:
        self._route = Route.to(address)
        self._timeout = timeout
        self._process = OwnProcess()
        self._closed = False
        options = (*methods.CHANNEL_OPTIONS, *self._route.options)
        self._channel = grpc.aio.insecure_channel(address.target, options=options)
        put, get = methods.PUT_TENSORS, methods.GET_TENSORS
        self._put = self._channel.stream_unary(put.path, put.encode, put.decode)
        self._get = self._channel.unary_stream(get.path, get.encode, get.decode)
        self._unary = functools.cache(functools.partial(_make_unary, self._channel))
        self._background: list[BackgroundTask] = []
        weakref.finalize(self, _stop, self._background).atexit = False

    async def run(self, operation: Operation[T]) -> T:
        """Returns the result of an operation, or raises its error."""
        self._process.check()
        attempts = with_retries(operation, self._timeout)
        try:
            step = next(attempts)
            while True:
                try:
                    answer = await self._perform(step)
                except GradserveError as error:
                    step = attempts.throw(error)
                else:
                    step = attempts.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            attempts.close()  # at once also where it was cancelled or interrupted

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
                    return await self._unary(service, method)(request, timeout=timeout)
                case Attempt(Upload() as upload, timeout):
                    return await self._put(upload_parts(upload), timeout=timeout)
                case Attempt(Download(request), timeout):
                    return await self._download(request, timeout)
                case Pause(seconds):
                    return await asyncio.sleep(seconds)
                case Background(begin):
                    return self._begin(begin())
        except grpc.RpcError as error:
            raise _failure(error, self._route, self._closed) from None
        except grpc.aio.UsageError:
            raise _closed() from None
        except asyncio.CancelledError:
            # The channel cancels its calls when it is closed; the task that made this one goes on.
            task = asyncio.current_task()
            if self._closed and (task is None or not task.cancelling()):
                raise _closed() from None
            raise

    async def _download(self, request: Any, timeout: float | None) -> list[Array]:
        parts = DownloadParts()
        call = self._get(request, timeout=timeout)
        try:
            async for part in call:
                parts.add(part)
        finally:
            call.cancel()
        return parts.finish()

    def _begin(self, operation: Operation[None]) -> None:
        unary = self._unary

        async def call(exchange: Unary, timeout: float | None) -> Any:
            return await unary(exchange.service, exchange.method)(exchange.request, timeout=timeout)

        self._background[:] = [each for each in self._background if not each.is_done]
        self._background.append(BackgroundTask(operation, self._timeout, call))


def _make_unary(channel: Any, service: str, method: str) -> Any:
    found = methods.unary(service, method)
    return channel.unary_unary(found.path, found.encode, found.decode)


def _stop(background: Sequence[BackgroundThread | BackgroundTask]) -> None:
    for each in background:
        each.stop()


def _closed() -> GradserveError:
    return CallCancelledError("the client is closed")


def _failure(error: Any, route: Route, is_closed: bool) -> GradserveError:
    if is_closed and error.code() is grpc.StatusCode.CANCELLED:
        return _closed()
    message = explain(error.code(), error.details(), route)
    return error_from_status(error.code(), message, error.trailing_metadata())
