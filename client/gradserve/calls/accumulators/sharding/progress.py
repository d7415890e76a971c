"""How far transfers to or from several servers are, told as one."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

from gradserve.calls.exchange import Operation, Pause
from gradserve.calls.progress import CallbackError, Progress
from gradserve.calls.together import together

T = TypeVar("T")

_INTERVAL_SECONDS = 0.02


class PartOfTransfer:
    """Counts the bytes that are moved to or from one server; see `Progress`.

    Transfers run in threads of their own. So this tells nobody: `moved_together` does, in the thread of the call.

    Attributes:
        num_bytes: How many bytes have been moved.
        num_received: How many bytes the reply has; None before that is known.
    """

    def __init__(self) -> None:
        self.failure: CallbackError | None = None
        self.num_bytes = 0
        self.num_received: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None, /
    ) -> None:
        pass

    def sends(self, num_bytes: int, /) -> None:
        """See `Progress`."""

    def receives(self, num_bytes: int, /) -> None:
        """See `Progress`."""
        if self.num_received is None:
            self.num_received, self.num_bytes = num_bytes, 0

    def begin(self, overhead: int = 0, /) -> None:
        """See `Progress`."""
        self.num_bytes = -overhead

    def moved(self, num_bytes: int, /) -> None:
        """See `Progress`."""
        self.num_bytes += num_bytes

    def add(self, num_bytes: int, /) -> bool:
        """See `Progress`."""
        self.num_bytes += num_bytes
        return False

    def tell(self) -> None:
        """See `Progress`."""

    def end(self) -> None:
        """See `Progress`."""


def sent_together(
    progress: Progress | None, num_bytes: int, operations: Sequence[Callable[[Progress | None], Operation[T]]]
) -> Operation[list[T]]:
    """Runs operations that send arrays, at the same time; returns their results.

    Args:
        progress: Told how far they are; None for nobody.
        num_bytes: How many bytes they send.
        operations: Begin the operations, each with its own part of the progress.
    """
    if progress is None:
        return (yield from _together([begin(None) for begin in operations]))
    progress.sends(num_bytes)
    return (yield from _reported(progress, operations, lambda parts: True))


def received_together(
    progress: Progress | None, operations: Sequence[Callable[[Progress | None], Operation[T]]]
) -> Operation[list[T]]:
    """Runs operations that receive arrays, at the same time; returns their results.

    Args:
        progress: Told how far they are, from when all know how much they receive; None for nobody.
        operations: Begin the operations, each with its own part of the progress.
    """
    if progress is None:
        return (yield from _together([begin(None) for begin in operations]))

    def is_known(parts: Sequence[PartOfTransfer]) -> bool:
        sizes = [each.num_received for each in parts if each.num_received is not None]
        if len(sizes) < len(parts):
            return False
        progress.receives(sum(sizes))
        return True

    return (yield from _reported(progress, operations, is_known))


def _reported(
    progress: Progress,
    operations: Sequence[Callable[[Progress | None], Operation[T]]],
    is_known: Callable[[Sequence[PartOfTransfer]], bool],
) -> Operation[list[T]]:
    parts = [PartOfTransfer() for _ in operations]
    left = set(range(len(operations)))

    def tell() -> None:
        if is_known(parts):
            progress.begin()
            progress.moved(sum([max(each.num_bytes, 0) for each in parts]))

    def ended(number: int) -> Operation[list[T]]:
        result = yield from operations[number](parts[number])
        left.discard(number)
        return [result]

    def reports() -> Operation[list[T]]:
        while left:
            yield Pause(_INTERVAL_SECONDS)
            tell()
        return []

    results = yield from together(*map(ended, range(len(operations))), reports())
    tell()
    return [each for result in results for each in result]


def _together(operations: Sequence[Operation[T]]) -> Operation[list[T]]:
    if len(operations) == 1:
        return [(yield from operations[0])]
    return (yield from together(*operations))
