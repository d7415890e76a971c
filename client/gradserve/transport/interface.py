"""The transport as a client sees it, whatever is behind it."""

from typing import Protocol, TypeVar

from gradserve.calls.exchange import Operation

T = TypeVar("T")


class BlockingTransport(Protocol):
    """Carries out operations in the calling thread. Safe to use from several threads."""

    def run(self, operation: Operation[T], /) -> T:
        """Returns the result of an operation, or raises its error."""
        ...

    def close(self) -> None:
        """Ends operations under way in other threads with CallCancelledError, and disconnects."""
        ...


class AsyncTransport(Protocol):
    """Carries out operations on the event loop in which it was made."""

    async def run(self, operation: Operation[T], /) -> T:
        """Returns the result of an operation, or raises its error."""
        ...

    async def close(self) -> None:
        """Ends operations under way with CallCancelledError, and disconnects."""
        ...
