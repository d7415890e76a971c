"""Operations that tell how far their transfers are."""

from collections.abc import Callable
from typing import TypeVar

from gradserve.calls.exchange import Operation, Track
from gradserve.calls.progress import Progress, Told, checked_progress

T = TypeVar("T")


def tracked(
    progress: Callable[[int, int], object] | bool | None, begin: Callable[[Progress | None], Operation[T]]
) -> Operation[T]:
    """Returns an operation that tells the argument `progress` of its caller how far it is.

    Args:
        progress: The argument.
        begin: Begins the operation, with what it has to tell how many bytes were moved; None for nobody.

    Raises:
        InvalidArgumentError: The argument cannot be used.
    """
    told = checked_progress(progress)
    return begin(None) if told is None else _tracked(told, begin)


def _tracked(told: Told, begin: Callable[[Progress | None], Operation[T]]) -> Operation[T]:
    progress: Progress = yield Track(told)
    with progress:
        result = yield from begin(progress)
        progress.end()
    return result
