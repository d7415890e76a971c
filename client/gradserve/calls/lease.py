"""The lease of a client at one server, which keeps its private resources, and tells that a worker is there."""

import logging
import math
import threading
from collections.abc import Mapping
from typing import Any, TypeVar

from gradserve.calls.exchange import Background, Operation, Pause, TimeLimits, Unary, encode_idle_lease
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
_LEAVING_SECONDS = 1.0
"""The most for which a worker tries to tell that it goes. Nothing of it is on the server, and its lease runs out."""
_UNKNOWN_OUTCOMES = (UnavailableError, DeadlineExceededError, InternalError, CallCancelledError)
_MAY_PASS = (UnavailableError, DeadlineExceededError, InternalError, ResourceExhaustedError)


class ClientLease:
    """The lease of a client at one server.

    A background call holds it while the client has private resources there: everything that it made without a shared
    name or scope and has not deleted. So these live as long as the client, however busy the program is, and end soon
    after it, even if nobody closes it. The lease of a worker is held until it ends, so rounds know that the worker is
    there, however long it computes without a call.

    Safe to use from several threads.
    """

    def __init__(self, client_id: str, calls_id: str, times: TimeLimits) -> None:
        """Takes the identity of the client.

        Args:
            client_id: Its id, which the server alone knows.
            calls_id: The one in the ids of its calls.
            times: The time limits of its calls.
        """
        self._client_id = client_id
        self._calls_id = calls_id
        self._times = times
        self._lock = threading.Lock()
        self._names: dict[str, object] = {}
        """The private resources, each with a mark of the last time that it was added."""
        self._is_worker = False
        self._holder: object | None = None

    def __len__(self) -> int:
        """Returns the number of private resources."""
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
            owner_client_id=self._client_id if is_private else "", idle_lease=encode_idle_lease(idle_lease)
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
        yield from self._begin_to_hold()
        return made

    def deleted(self, name: str) -> None:
        """Forgets a resource that was deleted, if it was private."""
        with self._lock:
            self._names.pop(name, None)

    def be_worker(self) -> Operation[None]:
        """Begins to hold the lease of a worker, in the background, unless that has begun."""
        if not self._is_worker:
            self._is_worker = True
            yield from self._begin_to_hold()

    def hold_for_worker(self) -> Operation[None]:
        """Holds the lease of a worker; see `hold`."""
        self._is_worker = True
        yield from self.hold()

    def hold(self) -> Operation[None]:
        """Holds the lease for as long as the client has private resources or is a worker.

        Calls that break off are made again. Ends when the server has ended the lease, or refuses to hold it.
        """
        with self._lock:
            if self._holder is None:  # it begins again, after a failure
                self._holder = object()
            holder = self._holder
        try:
            while held := self._to_hold():
                names, is_worker = held
                request = messages_pb2.HoldClientLeaseRequest(client_id=self._client_id)
                if is_worker:
                    request.worker_client_id = self._calls_id
                try:
                    reply: messages_pb2.HoldClientLeaseResponse = yield Unary(
                        _SERVICE, "HoldClientLease", request, wait=math.inf, only_over_grpc=True
                    )
                except _MAY_PASS:
                    yield Pause(_PAUSE_SECONDS)
                    continue
                except GradserveError as error:
                    _log.warning(
                        "this client can no longer renew its lease, so its private resources end, and a worker of it "
                        "counts as gone when it is silent: %s",
                        error,
                    )
                    return
                if reply.replaced:
                    yield Pause(_PAUSE_SECONDS)
                else:
                    # The server has none of them: they were deleted, or it is another server.
                    self._forget(names, is_worker=is_worker)
        finally:
            with self._lock:
                if self._holder is holder:
                    self._holder = None

    def end(self) -> Operation[None]:
        """Ends the lease, and with it all private resources."""
        with self._lock:
            names, is_worker = dict(self._names), self._is_worker
        if names or is_worker:
            request = messages_pb2.EndClientLeaseRequest(client_id=self._client_id)
            closing = self._times.closing if names else min(self._times.closing, _LEAVING_SECONDS)
            yield Unary(_SERVICE, "EndClientLease", request, at_most=closing)
            self._forget(names, is_worker=is_worker)

    def _add(self, name: str) -> None:
        with self._lock:
            self._names[name] = object()

    def _forget(self, names: Mapping[str, object], *, is_worker: bool) -> None:
        """Forgets resources, but for those whose creation was answered in the meantime: the server has them now."""
        with self._lock:
            for name, mark in names.items():
                if self._names.get(name) is mark:
                    del self._names[name]
            self._is_worker &= not is_worker

    def _begin_to_hold(self) -> Operation[None]:
        with self._lock:
            if self._holder is not None:
                return
            self._holder = object()
        yield Background(self.hold)

    def _to_hold(self) -> tuple[Mapping[str, object], bool] | None:
        """Returns the private resources, and whether this is a worker; None if there is nothing to hold."""
        with self._lock:
            if not self._names and not self._is_worker:
                # Under the lock: a name that is added later starts a new holder.
                self._holder = None
                return None
            return dict(self._names), self._is_worker
