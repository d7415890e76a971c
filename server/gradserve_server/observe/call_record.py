"""The record of the call that the current context answers."""

import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_CURRENT: "ContextVar[CallRecord | None]" = ContextVar("gradserve_call", default=None)
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


_NOWHERE = Origin()


def nowhere() -> Origin:
    """Returns the origin of a call about which nothing is known."""
    return _NOWHERE


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

    def __init__(self, method: str, began: float, origin: Callable[[], Origin] = nowhere) -> None:
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


def current_span() -> "Span | None":
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
