"""Exceptions that come from outside while a value is converted by its own library."""

import signal
from collections.abc import Iterator
from types import CodeType, TracebackType
from typing import Any


def is_interruption(error: Exception) -> bool:
    """Returns True if the handler of a signal has raised an exception: it says nothing of the value."""
    handlers = set(_handlers())
    return any(code in handlers for code in _codes(error.__traceback__))


def _handlers() -> Iterator[CodeType]:
    """Yields the code of the program's handlers of signals."""
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        function = getattr(handler, "func", handler)  # of a functools.partial
        if not hasattr(function, "__code__"):
            function = getattr(function, "__call__", None)  # noqa: B004 - of an object
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            yield code


def _codes(traceback: TracebackType | None) -> Iterator[CodeType]:
    while traceback is not None:
        yield traceback.tb_frame.f_code
        traceback = traceback.tb_next
