"""Makes blocking and asyncio methods from the operations in `gradserve.calls`.

So signatures, docstrings and behaviour are written once, and the two faces (the public classes) cannot drift apart.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Self, TypeVar

from gradserve.calls.exchange import CallbackError, Operation
from gradserve.errors import GradserveError, InvalidArgumentError
from gradserve.public_names import HiddenConstructor, described_as, name_methods, shown
from gradserve.transport.driving import AsyncTransport, BlockingTransport

P = ParamSpec("P")
T = TypeVar("T")
CallsT = TypeVar("CallsT")
CallsT_co = TypeVar("CallsT_co", covariant=True)
MadeT = TypeVar("MadeT")
FaceT = TypeVar("FaceT")


class _Compiler:
    """torch.compile, once PyTorch is imported; nothing here imports it.

    Attributes:
        is_tracing: Returns True in code that is traced rather than run. None: PyTorch was not imported.
        disable: Returns a function that compiled code calls as ordinary code, at a break of its graph.
    """

    is_tracing: Callable[[], bool] | None = None
    disable: Callable[[Callable[..., Any]], Callable[..., Any]]


def _find_compiler() -> bool:
    """Looks whether PyTorch has been imported; returns True if compiled code may be calling."""
    compiler: Any = getattr(sys.modules.get("torch"), "compiler", None)
    if not hasattr(compiler, "is_compiling"):
        return False
    _Compiler.disable = compiler.disable
    _Compiler.is_tracing = compiler.is_compiling
    return "torch._dynamo" in sys.modules


# As torch.compiler.disable does: it is run and not traced, because sys.modules changes during tracing.
_find_compiler._torchdynamo_disable = True  # type: ignore[attr-defined]


def _is_traced() -> bool:
    """Returns True if torch.compile is tracing the calling code: its tensors have no memory that could be sent."""
    return _find_compiler() if _Compiler.is_tracing is None else _Compiler.is_tracing()


class BlockingFace(Generic[CallsT_co]):
    """The base class of objects whose calls run in the calling thread."""

    __signature__ = HiddenConstructor()

    def __init__(self, transport: BlockingTransport, calls: CallsT_co) -> None:
        if _Compiler.is_tracing is None:
            _find_compiler()
        self._transport = transport
        self._calls = calls

    def __repr__(self) -> str:
        return shown(self)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise _not_copied(self)

    def __init_subclass__(cls) -> None:
        name_methods(cls)


class AsyncFace(Generic[CallsT_co]):
    """The base class of objects whose calls are coroutines."""

    __signature__ = HiddenConstructor()

    def __init__(self, transport: AsyncTransport, calls: CallsT_co) -> None:
        self._transport = transport
        self._calls = calls

    def __repr__(self) -> str:
        return shown(self)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise _not_copied(self)

    def __init_subclass__(cls) -> None:
        name_methods(cls)


class BriefErrors:
    """Removes gradserve's own frames from its errors: a traceback then ends at the line that made the call.

    Other exceptions keep their frames: they are faults of gradserve, or come from elsewhere. An error shows the
    exception that its caller was handling, as usual, unless it has its own cause.
    """

    def __enter__(self) -> None:
        self._handled = sys.exception()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, GradserveError):
            shorten(error, self._handled)


def _not_copied(face: object) -> InvalidArgumentError:
    """Returns the error for pickling or copying an object that makes calls."""
    return InvalidArgumentError(
        f"a {type(face).__name__} cannot be pickled or copied, as it has connections and threads of its process: "
        "connect where it is used, and find accumulators and layers by their names there"
    )


def shorten(error: GradserveError, handled: BaseException | None) -> None:
    """Removes the frames of an error, as `BriefErrors` does; `handled` is what its caller was handling.

    Raises:
        Exception: What a callback of the caller's has raised, if that has ended the call.
    """
    if isinstance(error, CallbackError):
        error.raise_error()
    error.__traceback__ = None
    if error.__suppress_context__ and error.__cause__ is None:  # raised from None, inside the caller's handler
        error.__context__ = handled
        error.__suppress_context__ = False


def with_operations(
    calls: type, method_of: Callable[[Any], Callable[..., Any]]
) -> Callable[[type[FaceT]], type[FaceT]]:
    """Adds a method to a face for each public operation of its calls.

    Args:
        calls: The class of the calls.
        method_of: The function that makes a method from an operation: `blocking` or `awaiting`.
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

    def run(self: BlockingFace[CallsT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        with BriefErrors():
            return self._transport.run(operation(self._calls, *args, **kwargs))

    @described_as(operation)
    def method(self: BlockingFace[CallsT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if _is_traced():
            # Not `method` again: what is true of a thread that compiles is also true of all others at that time.
            result: T = _Compiler.disable(run)(self, *args, **kwargs)
            return result
        handled = sys.exception()
        try:  # a BriefErrors block would take as long as all of this
            return self._transport.run(operation(self._calls, *args, **kwargs))
        except GradserveError as error:
            shorten(error, handled)
            raise

    return method


def blocking_making(
    operation: Callable[Concatenate[CallsT, P], Operation[T]], face: Callable[[BlockingTransport, T], MadeT]
) -> Callable[Concatenate[BlockingFace[CallsT], P], MadeT]:
    """Returns an operation whose result is another calls object as a blocking method that returns the face of that."""

    def run(self: BlockingFace[CallsT], /, *args: P.args, **kwargs: P.kwargs) -> MadeT:
        with BriefErrors():
            return face(self._transport, self._transport.run(operation(self._calls, *args, **kwargs)))

    @described_as(operation, face)
    def method(self: BlockingFace[CallsT], /, *args: P.args, **kwargs: P.kwargs) -> MadeT:
        if _is_traced():
            made: MadeT = _Compiler.disable(run)(self, *args, **kwargs)
            return made
        with BriefErrors():
            return face(self._transport, self._transport.run(operation(self._calls, *args, **kwargs)))

    return method


def blocking_another(
    operation: Callable[Concatenate[CallsT, P], Operation[T]],
    face: Callable[[], Callable[[BlockingTransport, T], MadeT]],
) -> Callable[Concatenate[BlockingFace[CallsT], P], MadeT]:
    """Returns an operation that makes calls of the class that it belongs to, like `blocking_making`.

    Args:
        operation: The operation.
        face: Returns the face, whose class is not complete yet.
    """

    def run(self: BlockingFace[CallsT], /, *args: P.args, **kwargs: P.kwargs) -> MadeT:
        with BriefErrors():
            return face()(self._transport, self._transport.run(operation(self._calls, *args, **kwargs)))

    @described_as(operation, Self)
    def method(self: BlockingFace[CallsT], /, *args: P.args, **kwargs: P.kwargs) -> MadeT:
        if _is_traced():
            made: MadeT = _Compiler.disable(run)(self, *args, **kwargs)
            return made
        return run(self, *args, **kwargs)

    return method


def awaiting(
    operation: Callable[Concatenate[CallsT, P], Operation[T]],
) -> Callable[Concatenate[AsyncFace[CallsT], P], Coroutine[Any, Any, T]]:
    """Returns an operation as a coroutine method."""

    @described_as(operation)
    async def method(self: AsyncFace[CallsT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        handled = sys.exception()
        try:
            return await self._transport.run(operation(self._calls, *args, **kwargs))
        except GradserveError as error:
            shorten(error, handled)
            raise

    return method


def awaiting_making(
    operation: Callable[Concatenate[CallsT, P], Operation[T]], face: Callable[[AsyncTransport, T], MadeT]
) -> Callable[Concatenate[AsyncFace[CallsT], P], Coroutine[Any, Any, MadeT]]:
    """Returns an operation whose result is another calls object as a coroutine method that returns the face of that."""

    @described_as(operation, face)
    async def method(self: AsyncFace[CallsT], /, *args: P.args, **kwargs: P.kwargs) -> MadeT:
        with BriefErrors():
            return face(self._transport, await self._transport.run(operation(self._calls, *args, **kwargs)))

    return method


def awaiting_another(
    operation: Callable[Concatenate[CallsT, P], Operation[T]], face: Callable[[], Callable[[AsyncTransport, T], MadeT]]
) -> Callable[Concatenate[AsyncFace[CallsT], P], Coroutine[Any, Any, MadeT]]:
    """Returns an operation that makes calls of the class that it belongs to, like `awaiting_making`.

    Args:
        operation: The operation.
        face: Returns the face, whose class is not complete yet.
    """

    @described_as(operation, Self)
    async def method(self: AsyncFace[CallsT], /, *args: P.args, **kwargs: P.kwargs) -> MadeT:
        with BriefErrors():
            return face()(self._transport, await self._transport.run(operation(self._calls, *args, **kwargs)))

    return method
