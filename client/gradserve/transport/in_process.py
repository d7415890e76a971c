"""Channels to servers in the same process, for tests: the messages that gRPC would carry, without a network.

They stand in for the channels of gRPC, below everything else of the client. The server is that of `gradserve.testing`.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

from gradserve.errors import CallCancelledError, UnavailableError
from gradserve_protocol.frames import Metadata

_Pull = Callable[[], Awaitable[bytes | None]]
"""Returns the next message of a request, on the server's event loop; None at the end."""
_Read = Callable[[list[bytes]], Any]
"""Parses the messages of a response."""


class Endpoint(Protocol):
    """A server in this process.

    Attributes:
        loop: The event loop on which it answers.
    """

    loop: asyncio.AbstractEventLoop

    async def answer(
        self, path: str, requests: AsyncIterator[bytes], timeout: float | None, metadata: Metadata, /
    ) -> list[bytes]:
        """Answers a call.

        Args:
            path: The method, "/gradserve.v1.TensorService/PutTensors".
            requests: The serialized messages of the request.
            timeout: The seconds that it may take; None for no limit.
            metadata: The metadata of the call.

        Raises:
            GradserveError: The call failed.
        """
        ...


_endpoints: dict[str, tuple[int, Endpoint]] = {}
"""The servers of this process by address, with the process in which they run."""


def add_endpoint(address: str, endpoint: Endpoint) -> None:
    """Lets clients of this process connect to a server."""
    _endpoints[address] = os.getpid(), endpoint


def remove_endpoint(address: str) -> None:
    """Ends that. Can be called again."""
    _endpoints.pop(address, None)


class InProcessChannels:
    """Opens channels to servers in this process, in place of the modules `grpc` and `grpc.aio`."""

    def __init__(self, *, is_async: bool) -> None:
        self._channel = _AsyncChannel if is_async else _Channel

    def insecure_channel(self, target: str, options: Any = None) -> Any:
        """Returns a channel to the server at an address."""
        return self._channel(target)

    def secure_channel(self, target: str, credentials: Any, options: Any = None) -> Any:
        """Returns the same: nothing leaves the process."""
        return self._channel(target)


class _Channel:
    """A channel. Its functions, and what they return, are like gRPC's."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._calls: WeakSet[_Call] = WeakSet()
        self._is_closed = False

    def unary_unary(self, path: str, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> Any:
        return self._method(self._one(encode), path, lambda parts: decode(parts[0]))

    def unary_stream(self, path: str, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> Any:
        return _Method(self._one(encode), path, lambda parts: list(map(decode, parts)), self._begin)

    def stream_unary(self, path: str, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> Any:
        return self._method(partial(self._each, encode), path, lambda parts: decode(parts[0]))

    def close(self) -> Any:
        self._is_closed = True
        for each in list(self._calls):
            each.cancel("the client is closed")

    def _method(self, pulling: Callable[[Any], _Pull], path: str, read: _Read) -> "_Method":
        return _WaitingMethod(pulling, path, read, self._begin)

    def _begin(self, path: str, pull: _Pull, read: _Read, *about: Any) -> "_Call":
        if self._is_closed:
            raise CallCancelledError("the client is closed")
        process, endpoint = _endpoints.get(self._address, (0, None))
        if endpoint is None or process != os.getpid():
            error = UnavailableError(
                f"no connection: there is no server {self._address} in this process",
                code="GS_NO_CONNECTION",
                was_sent=False,
            )
            error.may_pass = False
            raise error
        call = _Call(endpoint, endpoint.answer(path, _pulled(pull), *about), read)
        self._calls.add(call)
        return call

    @staticmethod
    def _one(encode: Callable[[Any], bytes]) -> Callable[[Any], _Pull]:
        def pulling(request: Any) -> _Pull:
            parts = iter([encode(request)])  # now: nobody reads the caller's memory later

            async def pull() -> bytes | None:
                return next(parts, None)

            return pull

        return pulling

    def _each(self, encode: Callable[[Any], bytes], requests: Iterator[Any]) -> _Pull:
        """Takes messages in a thread, as gRPC does, because they may wait for the caller's."""
        parts = map(encode, requests)
        return lambda: asyncio.to_thread(next, parts, None)


class _AsyncChannel(_Channel):
    """A channel whose calls are awaited."""

    async def close(self) -> None:
        super().close()

    def _method(self, pulling: Callable[[Any], _Pull], path: str, read: _Read) -> "_Method":
        return _Method(pulling, path, read, self._begin)

    def _each(self, encode: Callable[[Any], bytes], requests: Iterator[Any]) -> _Pull:
        """Takes messages on the event loop of the caller, as gRPC does."""
        parts, loop = map(encode, requests), asyncio.get_running_loop()

        async def take() -> bytes | None:
            return next(parts, None)

        return lambda: asyncio.wrap_future(asyncio.run_coroutine_threadsafe(take(), loop))


async def _pulled(pull: _Pull) -> AsyncIterator[bytes]:
    """Yields messages; ends the call if they fail, of which the server learns no more than over gRPC."""
    try:
        while (part := await pull()) is not None:
            yield part
    except Exception as error:
        raise asyncio.CancelledError from error


class _Method:
    """A method of a channel that returns calls."""

    def __init__(
        self,
        pulling: Callable[[Any], _Pull],
        path: str,
        read: _Read,
        begin: Callable[..., "_Call"],
    ) -> None:
        self._pulling = pulling
        self._path = path
        self._read = read
        self._begin = begin

    def future(self, request: Any, *, timeout: float | None, metadata: Metadata = ()) -> "_Call":
        return self._begin(self._path, self._pulling(request), self._read, timeout, metadata)

    __call__: Callable[..., Any] = future


class _WaitingMethod(_Method):
    """A method of a channel that returns answers."""

    def __call__(self, request: Any, *, timeout: float | None, metadata: Metadata = ()) -> Any:
        call = self.future(request, timeout=timeout, metadata=metadata)
        try:
            return call.result()
        finally:
            call.cancel()


class _Call(Future[Any]):
    """A call on a server's event loop: its result for threads and for tasks of any loop."""

    def __init__(self, endpoint: Endpoint, answer: Any, read: _Read) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()  # so that it ends when the server's task has ended
        self._loop = endpoint.loop
        self._read = read
        self._why = "the call was cancelled"
        self._task: asyncio.Task[list[bytes]] | None = None
        self._loop.call_soon_threadsafe(self._start, answer)

    def cancel(self, why: str = "") -> bool:
        """Ends the call soon, unless it has ended. Safe in any thread."""
        if not self.done():
            self._why = why or self._why
            self._loop.call_soon_threadsafe(lambda: self._task is not None and self._task.cancel())
        return False

    def __await__(self) -> Any:
        return asyncio.wrap_future(self).__await__()

    def __iter__(self) -> Iterator[Any]:
        yield from self.result()

    async def __aiter__(self) -> AsyncIterator[Any]:
        for each in await self:
            yield each

    def _start(self, answer: Any) -> None:
        self._task = self._loop.create_task(answer)
        self._task.add_done_callback(self._end)

    def _end(self, task: "asyncio.Task[list[bytes]]") -> None:
        try:
            self.set_result(self._read(task.result()))
        except asyncio.CancelledError:
            self.set_exception(CallCancelledError(self._why))
        except BaseException as error:
            self.set_exception(error)
