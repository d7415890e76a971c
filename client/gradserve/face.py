"""Makes blocking or asyncio methods of the operations of `gradserve.calls`.

So signatures, docstrings and behaviour exist once, and the two faces cannot drift apart.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from gradserve.calls.exchange import Operation
from gradserve.errors import GradserveError
from gradserve.public_names import HiddenConstructor, described_as, name_methods, shown
from gradserve.transport.interface import AsyncTransport, BlockingTransport

P = ParamSpec("P")
T = TypeVar("T")
CallsT = TypeVar("CallsT")
CallsT_co = TypeVar("CallsT_co", covariant=True)
MadeT = TypeVar("MadeT")
FaceT = TypeVar("FaceT")


class BlockingFace(Generic[CallsT_co]):
    """Something whose calls are carried out in the calling thread."""

    __signature__ = HiddenConstructor()

    def __init__(self, transport: BlockingTransport, calls: CallsT_co) -> None:
        self._transport = transport
        self._calls = calls

    def __repr__(self) -> str:
        return shown(self)

    def __init_subclass__(cls) -> None:
        name_methods(cls)


class AsyncFace(Generic[CallsT_co]):
    """Something whose calls are coroutines."""

    __signature__ = HiddenConstructor()

    def __init__(self, transport: AsyncTransport, calls: CallsT_co) -> None:
        self._transport = transport
        self._calls = calls

    def __repr__(self) -> str:
        return shown(self)

    def __init_subclass__(cls) -> None:
        name_methods(cls)


class BriefErrors:
    """Errors of gradserve leave the block without its frames: a traceback then ends at the line that made the call.

    What else is raised is a fault of gradserve, or none of its business, and keeps its frames. An error tells of the
    exception that its caller was handling, as any error does, unless it has a cause of its own.
    """

    def __enter__(self) -> None:
        self._handled = sys.exception()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, GradserveError):
            error.__traceback__ = None
            if error.__suppress_context__ and error.__cause__ is None:  # raised from None, inside the caller's handler
                error.__context__ = self._handled
                error.__suppress_context__ = False


def with_operations(
    calls: type, method_of: Callable[[Any], Callable[..., Any]]
) -> Callable[[type[FaceT]], type[FaceT]]:
    """Gives a face a method for each public operation of its calls.

    Args:
        calls: The class of the calls.
        method_of: Makes a method of an operation: `blocking` or `awaiting`.
    """

    def decorate(face: type[FaceT]) -> type[FaceT]:
        for name, operation in inspect.getmembers(calls, inspect.isfunction):
            if not name.startswith("_"):
                setattr(face, name, method_of(operation))
        name_methods(face)
        return face

    return decorate


def blocking(
    operation: Callable[Concatenate[CallsT, P], Operation[T]],
) -> Callable[Concatenate[BlockingFace[CallsT], P], T]:
    """Returns an operation as a blocking method."""

    @described_as(operation)
    def method(self: BlockingFace[CallsT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        with BriefErrors():
            return self._transport.run(operation(self._calls, *args, **kwargs))

    return method


def blocking_making(
    operation: Callable[Concatenate[CallsT, P], Operation[T]], face: Callable[[BlockingTransport, T], MadeT]
) -> Callable[Concatenate[BlockingFace[CallsT], P], MadeT]:
    """Returns an operation whose result is calls again as a blocking method that returns their face."""

    @described_as(operation, face)
    def method(self: BlockingFace[CallsT], /, *args: P.args, **kwargs: P.kwargs) -> MadeT:
        with BriefErrors():
            return face(self._transport, self._transport.run(operation(self._calls, *args, **kwargs)))

    return method


def awaiting(
    operation: Callable[Concatenate[CallsT, P], Operation[T]],
) -> Callable[Concatenate[AsyncFace[CallsT], P], Coroutine[Any, Any, T]]:
    """Returns an operation as a coroutine method."""

    @described_as(operation)
    async def method(self: AsyncFace[CallsT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        with BriefErrors():
            return await self._transport.run(operation(self._calls, *args, **kwargs))

    return method


def awaiting_making(
    operation: Callable[Concatenate[CallsT, P], Operation[T]], face: Callable[[AsyncTransport, T], MadeT]
) -> Callable[Concatenate[AsyncFace[CallsT], P], Coroutine[Any, Any, MadeT]]:
    """Returns an operation whose result is calls again as a coroutine method that returns their face."""

    @described_as(operation, face)
    async def method(self: AsyncFace[CallsT], /, *args: P.args, **kwargs: P.kwargs) -> MadeT:
        with BriefErrors():
            return face(self._transport, await self._transport.run(operation(self._calls, *args, **kwargs)))

    return method
