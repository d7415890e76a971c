"""The progress of a transfer, reported to callers who ask for it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Literal, NoReturn, Protocol, Self, TypeAlias

from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import GradserveError

Told: TypeAlias = Callable[[int, int], object] | Literal[True]
"""The receiver of progress reports: a callback, or a line on a terminal."""


class CallbackError(GradserveError):
    """The end of a call whose callback has raised an exception, until a face raises that in its place.

    Attributes:
        error: That exception.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the callback of the progress failed: {error!r}")
        self.error = error

    def raise_error(self) -> NoReturn:
        """Raises the exception of the callback, which then refers to nothing of the call."""
        error, context, traceback = self.error, self.error.__context__, self.error.__traceback__
        del self.error
        self.__context__ = None
        try:
            raise error.with_traceback(traceback and traceback.tb_next)  # without the frame that called the callback
        finally:
            error.__context__ = context  # not this one
            del error, context, traceback  # or they are a cycle


class Progress(Protocol):
    """Counts the bytes of a transfer, and tells the caller from time to time.

    A context manager, for the time of the call. If the callback raises an exception, so does what tells it.

    Attributes:
        failure: The error that ends the call, if the callback has raised an exception.
    """

    failure: CallbackError | None

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

    def sends(self, num_bytes: int, /) -> None:
        """Tells the caller how many bytes the call sends.

        Raises:
            CallbackError: The callback has raised an exception.
        """
        ...

    def receives(self, num_bytes: int, /) -> None:
        """Tells the caller how many bytes the call receives, after those that it sends. Only the first time counts.

        Raises:
            CallbackError: The callback has raised an exception.
        """
        ...

    def begin(self, overhead: int = 0, /) -> None:
        """Notes that the transfer begins, or begins again; the first `overhead` bytes that are moved do not count."""
        ...

    def moved(self, num_bytes: int, /) -> None:
        """Adds bytes that were moved.

        Raises:
            CallbackError: The callback has raised an exception.
        """
        ...

    def add(self, num_bytes: int, /) -> bool:
        """Adds bytes that were moved; returns True if it is time for `tell`. Both are `moved`, where threads differ.

        Raises:
            CallbackError: The callback has raised an exception before.
        """
        ...

    def tell(self) -> None:
        """Tells the caller how many bytes were moved.

        Raises:
            CallbackError: The callback has raised an exception.
        """
        ...

    def end(self) -> None:
        """Tells the caller that all was moved. Can be called again.

        Raises:
            CallbackError: The callback has raised an exception.
        """
        ...


def checked_progress(progress: Callable[[int, int], object] | bool | None) -> Told | None:
    """Returns an argument `progress`; None if there is nothing to tell.

    Raises:
        InvalidArgumentError: It is neither a callable nor a flag.
    """
    if progress is None or progress is False:
        return None
    if progress is True or callable(progress):
        return progress
    raise Argument("progress").error("a callable, True, False or None", progress)
