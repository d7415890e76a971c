"""The private resources of a client, and the lease that keeps them alive."""

import logging
import math
import threading
from typing import Any, TypeVar

from gradserve.calls.exchange import Background, Operation, Pause, TimeLimits, Unary, encode_idle_lease
from gradserve.calls.identity import RequestIds
from gradserve_protocol.errors import (
    CallCancelledError,
    DeadlineExceededError,
    GradserveError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)
from gradserve_protocol.v1 import lease_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import lease_pb2

T = TypeVar("T")

_log = logging.getLogger("gradserve")

_SERVICE = "LeaseService"
_PAUSE_SECONDS = 2.0
"""The pause before the lease is held again after a failure."""
_UNKNOWN_OUTCOMES = (UnavailableError, DeadlineExceededError, InternalError, CallCancelledError)
_MAY_PASS = (UnavailableError, DeadlineExceededError, InternalError, ResourceExhaustedError)


class PrivateResources:
    """The names of everything that a client made without a shared name or scope and has not deleted.

    While there are any, a background call holds the lease of the client. So private resources live as long as the
    client, however busy the program is, and end soon after it, even if nobody closes it.

    Safe to use from several threads.
    """

    def __init__(self, ids: RequestIds, times: TimeLimits) -> None:
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
            idle_lease: Seconds without use after which it is deleted; None: never.
            is_private: Whether it is private to this client.

        Raises:
            InvalidArgumentError: The lease is not a number of seconds.
        """
        return lease_pb2.Lifetime(
            owner_client_id=self._ids.client_id if is_private else "", idle_lease=encode_idle_lease(idle_lease)
        )

    def create(self, name: str, creation: Operation[T]) -> Operation[T]:
        """Creates a private resource, and keeps it alive as long as this client lives."""
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
        """Forgets a resource that was deleted, if it was private."""
        with self._lock:
            self._names.discard(name)

    def delete_all(self) -> Operation[None]:
        """Deletes all private resources, and ends the lease of the client."""
        with self._lock:
            names = set(self._names)
        if names:
            request = messages_pb2.EndClientLeaseRequest(client_id=self._ids.client_id)
            yield Unary(_SERVICE, "EndClientLease", request, at_most=self._times.closing)
            self._forget(names)

    def _hold(self) -> Operation[None]:
        """Holds the lease of the client while there are private resources."""
        with self._lock:
            if self._holder is None:  # it begins again, after a failure
                self._holder = object()
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
                except GradserveError as error:
                    _log.warning(
                        "this client can no longer renew its lease, so its private resources end: %s",
                        error,
                    )
                    return
                if reply.replaced:
                    yield Pause(_PAUSE_SECONDS)
                else:
                    # The server has none of them: they were deleted, or it is another server.
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
                # Under the lock: a name that is added later starts a new holder.
                self._holder = None
            return set(self._names)
