"""The end of long work in threads before it is done."""

import copy
from collections.abc import Callable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from gradserve_server.errors import ServiceError

P = ParamSpec("P")
T = TypeVar("T")


class Cancellation:
    """Tells the threads of one piece of work to end. Safe to use from several threads.

    Work looks at it at each `checkpoint`: between two kernels, two steps, two tiles of a large product. So it ends soon
    after it was cancelled, and nothing has to be interrupted. Its results are lost.
    """

    def __init__(self) -> None:
        self._reason: ServiceError | None = None

    def cancel(self, reason: ServiceError) -> None:
        """Makes each checkpoint of the work raise `reason` from now on."""
        self._reason = reason

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function as a part of the work, in any thread; returns what it returns.

        Raises:
            ServiceError: The work was cancelled.
        """
        before = _current.set(self)
        try:
            checkpoint()
            return function(*args, **kwargs)
        finally:
            _current.reset(before)

    def check(self) -> None:
        """Raises the reason if the work was cancelled."""
        if self._reason is not None:
            # A copy: an error that is kept keeps its traceback, and so the arrays of the work that it ended.
            raise copy.copy(self._reason)


_current: ContextVar[Cancellation | None] = ContextVar("cancellation", default=None)


def checkpoint() -> None:
    """Ends the work that this thread does, if it was cancelled.

    Raises:
        ServiceError: The reason why it was.
    """
    cancellation = _current.get()
    if cancellation is not None:
        cancellation.check()


def current() -> Cancellation:
    """Returns the cancellation of the work that this thread does, for parts of it in others."""
    return _current.get() or Cancellation()
