"""What a client made for itself alone, and what keeps it as long as the client."""

import math
import threading
from typing import Any, TypeVar

from gradserve.calls.exchange import Background, Operation, Pause, Unary, encode_idle_lease
from gradserve.calls.identity import RequestIds
from gradserve.calls.time_limits import TimeLimits
from gradserve.errors import (
    CallCancelledError,
    DeadlineExceededError,
    GradserveError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)
from gradserve.v1 import lease_messages_pb2 as messages_pb2
from gradserve.v1 import lease_pb2

T = TypeVar("T")

_SERVICE = "LeaseService"
_PAUSE_SECONDS = 2.0
"""Before the lease is held again, when that has failed."""
_UNKNOWN_OUTCOMES = (UnavailableError, DeadlineExceededError, InternalError, CallCancelledError)
_MAY_PASS = (UnavailableError, DeadlineExceededError, InternalError, ResourceExhaustedError)


class PrivateResources:
    """Knows what a client made without a shared name or scope, until it is deleted.

    While there is anything, a call in the background holds the lease of the client. So what is private lives as long as
    the client, however busy the program is, and ends soon after it, also when nobody closes it.

    Safe to use from several threads.
    """

    def __init__(self, ids: RequestIds, times: TimeLimits) -> None:
        """Takes the identity of the client, and how long its calls may take."""
        self._ids = ids
        self._times = times
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._holder: object | None = None

    def __len__(self) -> int:
        return len(self._names)

    def lifetime(self, idle_lease: Any, *, is_private: bool) -> lease_pb2.Lifetime:
        """Returns the lifetime of something new.

        Args:
            idle_lease: Seconds without use after which it ends; None: it does not.
            is_private: It is this client's own.

        Raises:
            InvalidArgumentError: The lease is no number of seconds.
        """
        return lease_pb2.Lifetime(
            owner_client_id=self._ids.client_id if is_private else "", idle_lease=encode_idle_lease(idle_lease)
        )

    def create(self, name: str, creation: Operation[T]) -> Operation[T]:
        """Creates something private, and sees to it that it lives as long as this client."""
        self._add(name)
        try:
            made = yield from creation
        except GradserveError as error:
            if not isinstance(error, _UNKNOWN_OUTCOMES):
                self.deleted(name)
            raise
        self._add(name)
        if self._begins_to_hold():
            yield Background(self._hold)
        return made

    def deleted(self, name: str) -> None:
        """Forgets what was deleted, if it was private."""
        with self._lock:
            self._names.discard(name)

    def delete_all(self) -> Operation[None]:
        """Deletes all of it, with the lease of the client."""
        with self._lock:
            names = set(self._names)
        if names:
            request = messages_pb2.EndClientLeaseRequest(client_id=self._ids.client_id)
            yield Unary(_SERVICE, "EndClientLease", request, at_most=self._times.closing)
            self._forget(names)

    def _hold(self) -> Operation[None]:
        """Holds the lease of the client as long as there is anything."""
        holder = self._holder
        request = messages_pb2.HoldClientLeaseRequest(client_id=self._ids.client_id)
        try:
            while names := self._names_to_hold():
                try:
                    reply: messages_pb2.HoldClientLeaseResponse = yield Unary(
                        _SERVICE, "HoldClientLease", request, wait=math.inf
                    )
                except _MAY_PASS:
                    yield Pause(_PAUSE_SECONDS)
                    continue
                except GradserveError:
                    return
                if reply.replaced:
                    yield Pause(_PAUSE_SECONDS)
                else:
                    # The server has nothing of it (any more): it is another one, or they were deleted.
                    self._forget(names)
        finally:
            with self._lock:
                if self._holder is holder:
                    self._holder = None

    def _add(self, name: str) -> None:
        with self._lock:
            self._names.add(name)

    def _forget(self, names: set[str]) -> None:
        with self._lock:
            self._names -= names

    def _begins_to_hold(self) -> bool:
        with self._lock:
            if self._holder is not None:
                return False
            self._holder = object()
            return True

    def _names_to_hold(self) -> set[str]:
        with self._lock:
            if not self._names:
                # In this moment: whoever adds a name after it holds the lease anew.
                self._holder = None
            return set(self._names)
