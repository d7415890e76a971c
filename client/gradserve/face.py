"""Makes blocking or asyncio methods of the operations of `gradserve.calls`.

So signatures, docstrings and behaviour exist once, and the two faces cannot drift apart.
"""

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_args, get_type_hints

from gradserve.calls.exchange import Operation
from gradserve.transport import AsyncTransport, SyncTransport

P = ParamSpec("P")
T = TypeVar("T")
CallsT = TypeVar("CallsT")
CallsT_co = TypeVar("CallsT_co", covariant=True)
MadeT = TypeVar("MadeT")


class BlockingFace(Generic[CallsT_co]):
    """Something whose calls are carried out in the calling thread."""

    def __init__(self, transport: SyncTransport, calls: CallsT_co) -> None:
        self._transport = transport
        self._calls = calls


class AsyncFace(Generic[CallsT_co]):
    """Something whose calls are coroutines."""

    def __init__(self, transport: AsyncTransport, calls: CallsT_co) -> None:
        self._transport = transport
        self._calls = calls


def blocking(
    operation: Callable[Concatenate[CallsT, P], Operation[T]],
) -> Callable[Concatenate[BlockingFace[CallsT], P], T]:
    """Returns an operation as a blocking method."""

    @_like(operation)
    def method(self: BlockingFace[CallsT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._transport.run(operation(self._calls, *args, **kwargs))

    return method


def blocking_making(
    operation: Callable[Concatenate[CallsT, P], Operation[T]], face: Callable[[SyncTransport, T], MadeT]
) -> Callable[Concatenate[BlockingFace[CallsT], P], MadeT]:
    """Returns an operation whose result is calls again as a blocking method that returns their face."""

    @_like(operation, face)
    def method(self: BlockingFace[CallsT], /, *args: P.args, **kwargs: P.kwargs) -> MadeT:
        return face(self._transport, self._transport.run(operation(self._calls, *args, **kwargs)))

    return method


def awaiting(
    operation: Callable[Concatenate[CallsT, P], Operation[T]],
) -> Callable[Concatenate[AsyncFace[CallsT], P], Coroutine[Any, Any, T]]:
    """Returns an operation as a coroutine method."""

    @_like(operation)
    async def method(self: AsyncFace[CallsT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._transport.run(operation(self._calls, *args, **kwargs))

    return method


def awaiting_making(
    operation: Callable[Concatenate[CallsT, P], Operation[T]], face: Callable[[AsyncTransport, T], MadeT]
) -> Callable[Concatenate[AsyncFace[CallsT], P], Coroutine[Any, Any, MadeT]]:
    """Returns an operation whose result is calls again as a coroutine method that returns their face."""

    @_like(operation, face)
    async def method(self: AsyncFace[CallsT], /, *args: P.args, **kwargs: P.kwargs) -> MadeT:
        return face(self._transport, await self._transport.run(operation(self._calls, *args, **kwargs)))

    return method


def _like(operation: Callable[..., Any], made: Any = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Gives a method the name, docstring and signature of an operation, with what it really returns."""
    result = made if made is not None else get_args(get_type_hints(operation)["return"])[-1]
    signature = inspect.signature(operation).replace(return_annotation=result)

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        wrapped = functools.wraps(operation)(method)
        wrapped.__signature__ = signature  # type: ignore[attr-defined]
        return wrapped

    return decorate
