"""The record of the call that is being answered."""

import time
from contextvars import ContextVar

_CURRENT: "ContextVar[CallRecord | None]" = ContextVar("gradserve_call", default=None)


class CallRecord:
    """What is known about one call while it is answered.

    Attributes:
        method: The full name of its method.
        began: When it began, by `time.monotonic`.
        waited: Seconds that it has waited for other workers.
    """

    __slots__ = ("began", "method", "waited")

    def __init__(self, method: str, began: float) -> None:
        """Begins the record; from now on it is the current one of this context."""
        self.method = method
        self.began = began
        self.waited = 0.0
        _CURRENT.set(self)


def current_call() -> CallRecord | None:
    """Returns the record of the call that this code runs for; None outside of calls."""
    return _CURRENT.get()


class Waiting:
    """A block in which the current call waits for other workers."""

    __slots__ = ("_began", "_record")

    def __enter__(self) -> None:
        """Begins to wait."""
        self._record = _CURRENT.get()
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        """Counts the time."""
        if self._record is not None:
            self._record.waited += time.monotonic() - self._began
