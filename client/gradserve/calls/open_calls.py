"""Calls whose answers have not arrived."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gradserve.errors import (
    CallCancelledError,
    DeadlineExceededError,
    GradserveError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)

AccumulatorKey = tuple[str, str]
"""Container and name of an accumulator."""

_MAX_FAILED = 16
_MAY_COME_AGAIN = (CallCancelledError, DeadlineExceededError, InternalError, UnavailableError)


class OpenCalls:
    """The takes and push_pulls of one client whose averages have not arrived.

    Each request tells the server the numbers of the open calls, so that the server keeps their averages. A failed call
    stays open because it may be repeated with its request id: the latest 16 of each accumulator do.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[AccumulatorKey, dict[int, None]] = {}
        self._failed: dict[AccumulatorKey, dict[int, None]] = {}
        self._pushing: set[tuple[AccumulatorKey, str]] = set()

    def before(self, accumulator: AccumulatorKey, number: int) -> list[int]:
        """Returns the open calls on an accumulator with a smaller number."""
        with self._lock:
            found = [*self._open.get(accumulator, ()), *self._failed.get(accumulator, ())]
        return sorted(each for each in found if each < number)

    @contextmanager
    def opened(self, accumulator: AccumulatorKey, number: int) -> Iterator[None]:
        """Lists a call as open while the block waits for its average, and after an error that permits a retry."""
        with self._lock:
            self._failed.get(accumulator, {}).pop(number, None)
            self._open.setdefault(accumulator, {})[number] = None
        failed = False
        try:
            yield
        except GradserveError as error:
            failed = isinstance(error, _MAY_COME_AGAIN)
            raise
        finally:
            with self._lock:
                self._close(self._open, accumulator, number)
                if failed:
                    self._keep_failed(accumulator, number)
                elif accumulator in self._failed:
                    self._close(self._failed, accumulator, number)

    @contextmanager
    def alone(self, accumulator: AccumulatorKey, worker_id: str) -> Iterator[None]:
        """Allows one push_pull at a time under the default worker id.

        Raises:
            InvalidArgumentError: Another one is under way: two workers share the id, and only one would count.
        """
        key = (accumulator, worker_id)
        with self._lock:
            if key in self._pushing:
                raise InvalidArgumentError(
                    f"expected a worker_id, got none: another push_pull to accumulator {accumulator[1]!r} is under way "
                    f"with this client's default one, {worker_id!r}, and each worker counts once a round",
                    field="worker_id",
                )
            self._pushing.add(key)
        try:
            yield
        finally:
            with self._lock:
                self._pushing.discard(key)

    def _keep_failed(self, accumulator: AccumulatorKey, number: int) -> None:
        failed = self._failed.setdefault(accumulator, {})
        failed[number] = None
        while len(failed) > _MAX_FAILED:
            del failed[next(iter(failed))]

    @staticmethod
    def _close(calls: dict[AccumulatorKey, dict[int, None]], accumulator: AccumulatorKey, number: int) -> None:
        numbers = calls[accumulator]
        numbers.pop(number, None)
        if not numbers:
            del calls[accumulator]
