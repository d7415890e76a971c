"""The record of the call that the current context answers; counts and times of all calls, bytes by transport."""

from __future__ import annotations

import re
import secrets
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_CURRENT: ContextVar[CallRecord | None] = ContextVar("gradserve_call", default=None)
_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,64}", re.ASCII)
_ID_BYTES = 6


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a call.

    Attributes:
        peer: The client's address, in the transport's notation; empty if unknown.
        request_id: The id that the client gave the call; empty for none.
        metadata: The call's metadata, by keys in lower case.
    """

    peer: str = ""
    request_id: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


class CallRecord:
    """The record of a call while it is answered.

    Attributes:
        method: The full name of its method.
        began: When it began, by `time.monotonic`.
        origin: Returns where it came from.
        waited: Seconds that it has waited for other workers.
        identity: The name of its caller once known; empty on a server without access control.
        has_ended: Whether its answer is ready.
        span: Its OpenTelemetry span; None if it has none.
    """

    __slots__ = ("_request_id", "began", "has_ended", "identity", "method", "origin", "span", "waited")

    def __init__(self, method: str, began: float, origin: Callable[[], Origin] = Origin) -> None:
        """Makes the record the current one of this context."""
        self.method = method
        self.began = began
        self.origin = origin
        self.waited = 0.0
        self.identity = ""
        self.has_ended = False
        self.span: Span | None = None
        self._request_id = ""
        _CURRENT.set(self)

    @property
    def request_id(self) -> str:
        """The client's id for the call if it is short and plain, otherwise its trace's id or a random one."""
        if not self._request_id:
            given = self.origin().request_id
            self._request_id = given if _ID.fullmatch(given) else self.trace_id or secrets.token_hex(_ID_BYTES)
        return self._request_id

    @property
    def trace_id(self) -> str:
        """The id of its trace in hexadecimal digits; empty if it has no span."""
        return "" if self.span is None else f"{self.span.get_span_context().trace_id:032x}"


def current_call() -> CallRecord | None:
    """Returns the record of the call that this code runs for; None outside of calls, and once the answer is ready."""
    call = _CURRENT.get()
    return None if call is None or call.has_ended else call


def current_span() -> Span | None:
    """Returns the span of the call that this code runs for, even if that has ended; None if it has none."""
    call = _CURRENT.get()
    return None if call is None else call.span


class Waiting:
    """A block in which the current call waits for other workers."""

    __slots__ = ("_began", "_record")

    def __enter__(self) -> Self:
        """Starts the clock."""
        self._record = _CURRENT.get()
        self._began = time.monotonic()
        return self

    def served(self, step: int) -> None: ...

    def __exit__(self, *_: object) -> None:
        """Adds the time to the call's record."""
        if self._record is not None:
            self._record.waited += time.monotonic() - self._began


CALL_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Bounds for the duration of calls; the shortest take less than a tenth of a millisecond."""
ROUND_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds for rounds and waits, which last as long as the slowest worker computes."""
STEPS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, 64.0)
"""Bounds for how many steps a gradient was late."""
_MOST_ERRORS = 200
_MOST_CHARACTERS = 300


class Calls:
    """All calls of the server, by method, and the latest errors. Used on the event loop only."""

    def __init__(self) -> None:
        self._methods: dict[str, MethodCalls] = {}
        self._errors: OrderedDict[tuple[str, str], RecentError] = OrderedDict()

    def of(self, service: str, method: str, kind: str) -> MethodCalls:
        """Returns the calls of a method."""
        return self._methods.setdefault(f"{service}.{method}", MethodCalls(service, method, kind))

    def __iter__(self) -> Iterator[MethodCalls]:
        return iter(self._methods.values())

    @property
    def errors(self) -> list[RecentError]:
        """The latest error of each method and code, the newest first."""
        return list(reversed(self._errors.values()))

    def failed(self, method: str, code: str, message: str) -> None:
        """Records the error with which a call ended."""
        found = self._errors.pop((method, code), None) or RecentError(method, code, "")
        found.message, found.at = message[:_MOST_CHARACTERS], time.monotonic()
        found.count += 1
        self._errors[method, code] = found
        if len(self._errors) > _MOST_ERRORS:
            self._errors.popitem(last=False)


@dataclass(slots=True, eq=False)
class MethodCalls:
    """The calls of one method.

    Attributes:
        service: The full name of its service.
        method: Its name.
        kind: "unary", "client_stream", "server_stream" or "bidi_stream".
        started: The number of calls.
        handled: The number of calls that have ended, by the name of the status code.
        working: Seconds that calls took, not counting waits for other workers.
        waiting: Seconds that calls waited for other workers; only of those that did.
    """

    service: str
    method: str
    kind: str
    started: int = 0
    handled: dict[str, int] = field(default_factory=dict)
    working: Histogram = field(default_factory=lambda: Histogram(CALL_SECONDS))
    waiting: Histogram = field(default_factory=lambda: Histogram(ROUND_SECONDS))

    @property
    def in_progress(self) -> int:
        """The number of calls that have not ended."""
        return self.started - sum(self.handled.values())

    def copy(self) -> Self:
        """Returns the counts so far."""
        return replace(self, handled=dict(self.handled), working=self.working.copy(), waiting=self.waiting.copy())

    def end(self, code: str, seconds: float, waited: float) -> None:
        """Counts the end of a call.

        Args:
            code: The name of its status code.
            seconds: How long it took in all.
            waited: How much of that it waited for other workers.
        """
        self.handled[code] = self.handled.get(code, 0) + 1
        if waited:
            self.waiting.observe(waited)
        self.working.observe(seconds - waited)


@dataclass(slots=True)
class RecentError:
    """An error with which calls ended.

    Attributes:
        method: The full name of their method.
        code: The name of the status code.
        message: The message of the latest.
        count: The number of such calls.
        at: When the latest ended, by `time.monotonic`.
    """

    method: str
    code: str
    message: str
    count: int = 0
    at: float = 0.0


@dataclass(slots=True)
class Way:
    """Bytes and calls of one transport.

    Attributes:
        received: Bytes of requests, both messages and tensors.
        sent: Bytes of replies.
        calls: The number of calls.
    """

    received: int = 0
    sent: int = 0
    calls: int = 0


@dataclass(frozen=True)
class WireTraffic:
    """Bytes and calls of all transports.

    Attributes:
        grpc: gRPC, over TCP or a Unix socket.
        bulk: Sockets over TCP.
        shared_memory: Unix sockets, with tensors in memory that client and server share.
    """

    grpc: Way = field(default_factory=Way)
    bulk: Way = field(default_factory=Way)
    shared_memory: Way = field(default_factory=Way)

    def by_name(self) -> dict[str, Way]:
        """Returns the transports by the names that clients use for them."""
        return {"grpc": self.grpc, "bulk": self.bulk, "shared_memory": self.shared_memory}


class Histogram:
    """Counts of values between fixed bounds. Not thread-safe: used on the event loop only.

    Attributes:
        bounds: The inclusive upper bounds in increasing order; one more bucket counts larger values.
        counts: The number of values in each bucket.
        total: The sum of all values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Self:
        """Returns a histogram of the values so far."""
        made = type(self)(self.bounds)
        made.counts[:] = self.counts
        made.total = self.total
        return made

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)
