"""Calls whose answers have not arrived."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from gradserve.errors import (
    CallCancelledError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)

AccumulatorKey = tuple[str, str]
"""Container and name of an accumulator."""


class CallId(NamedTuple):
    """The id by which the server knows a call.

    Attributes:
        client_id: The client whose calls the number counts.
        sequence: The number.
    """

    client_id: str
    sequence: int


_MAX_FAILED = 16
_MAY_COME_AGAIN = (CallCancelledError, DeadlineExceededError, InternalError, UnavailableError)


class OpenCalls:
    """The takes and push_pulls of one client whose averages have not arrived.

    Each request tells the server the numbers of the open calls, so that the server keeps their averages. A failed call
    stays open because it may be repeated with its request id: the latest 16 of each accumulator do.

    Safe to use from several threads.

    Attributes:
        numbering: Held while a call gets its number. A call that waits is listed before the lock is released, so no
            call with a greater number, which may reach the server at any time, can miss it.
    """

    def __init__(self) -> None:
        # Reentrant: the garbage collector may end objects here whose calls have numbers, too.
        self.numbering = self._lock = threading.RLock()
        self._open: dict[AccumulatorKey, dict[CallId, None]] = {}
        self._failed: dict[AccumulatorKey, dict[CallId, None]] = {}
        self._pushing: set[tuple[AccumulatorKey, str]] = set()

    def before(self, accumulator: AccumulatorKey, call: CallId) -> list[int]:
        """Returns the numbers of the open calls on an accumulator before this one."""
        if not (self._open or self._failed):
            return []
        with self._lock:
            found = [*self._open.get(accumulator, ()), *self._failed.get(accumulator, ())]
        return sorted([each.sequence for each in found if each.client_id == call.client_id and each < call])

    def opened(
        self, accumulator: AccumulatorKey, new_call: Callable[[], CallId], *, may_come_again: bool = True
    ) -> AbstractContextManager[CallId]:
        """Lists a call as open while the block waits for its average, and after an error that permits a retry.

        Args:
            accumulator: Its accumulator.
            new_call: Returns the id of the call, which the block gets.
            may_come_again: False if nobody will make the call again, whatever its error permits.
        """
        return _Opened(self, accumulator, new_call, may_come_again=may_come_again)

    def begin(self, accumulator: AccumulatorKey, call: CallId) -> None:
        """Lists a call as open; `end` must follow."""
        with self._lock:
            if accumulator in self._failed:
                self._failed[accumulator].pop(call, None)
            self._open.setdefault(accumulator, {})[call] = None

    def end(self, accumulator: AccumulatorKey, call: CallId, error: BaseException | None) -> None:
        """Takes a call off the list, unless its error permits a retry."""
        with self._lock:
            self._close(self._open, accumulator, call)
            if isinstance(error, _MAY_COME_AGAIN):
                self._keep_failed(accumulator, call)
            elif accumulator in self._failed:
                self._close(self._failed, accumulator, call)

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

    def _keep_failed(self, accumulator: AccumulatorKey, call: CallId) -> None:
        failed = self._failed.setdefault(accumulator, {})
        failed[call] = None
        while len(failed) > _MAX_FAILED:
            del failed[next(iter(failed))]

    @staticmethod
    def _close(calls: dict[AccumulatorKey, dict[CallId, None]], accumulator: AccumulatorKey, call: CallId) -> None:
        numbers = calls[accumulator]
        numbers.pop(call, None)
        if not numbers:
            del calls[accumulator]


class _Opened(AbstractContextManager[CallId]):
    """Lists a call as open for the length of a block."""

    def __init__(
        self, calls: OpenCalls, accumulator: AccumulatorKey, new_call: Callable[[], CallId], *, may_come_again: bool
    ) -> None:
        self._calls = calls
        self._accumulator = accumulator
        self._new_call = new_call
        self._may_come_again = may_come_again

    def __enter__(self) -> CallId:
        with self._calls.numbering:
            self._call = self._new_call()
            self._calls.begin(self._accumulator, self._call)
        return self._call

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._calls.end(self._accumulator, self._call, error if self._may_come_again else None)
