"""What a client asks of a transport, whatever that is made of."""

from typing import Protocol, TypeVar

from gradserve.calls.exchange import Operation

T = TypeVar("T")


class BlockingTransport(Protocol):
    """Carries operations out in the calling thread. Safe to use from several threads."""

    def run(self, operation: Operation[T], /) -> T:
        """Returns the result of an operation, or raises its error."""
        ...

    def close(self) -> None:
        """Ends operations under way in other threads with CallCancelledError, and disconnects."""
        ...


class AsyncTransport(Protocol):
    """Carries operations out on the event loop it was made on."""

    async def run(self, operation: Operation[T], /) -> T:
        """Returns the result of an operation, or raises its error."""
        ...

    async def close(self) -> None:
        """Ends operations under way with CallCancelledError, and disconnects."""
        ...
