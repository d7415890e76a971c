"""Counts and times of calls."""

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from gradserve_server.observe.histogram import CALL_SECONDS, ROUND_SECONDS, Histogram

_MOST_ERRORS = 200
_MOST_CHARACTERS = 300


@dataclass(slots=True)
class RecentError:
    """An error that calls have ended with.

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


class MethodCalls:
    """The calls of one method.

    Attributes:
        service: The full name of its service.
        method: Its name.
        kind: "unary", "client_stream", "server_stream" or "bidi_stream".
        started: The number of calls.
        handled: The number of calls that have ended, by the name of the status code.
        working: Seconds that calls took, without those in which they waited for other workers.
        waiting: Seconds that calls waited for other workers, of those that did.
    """

    __slots__ = ("handled", "kind", "method", "service", "started", "waiting", "working")

    def __init__(self, service: str, method: str, kind: str) -> None:
        self.service = service
        self.method = method
        self.kind = kind
        self.started = 0
        self.handled: dict[str, int] = {}
        self.working = Histogram(CALL_SECONDS)
        self.waiting = Histogram(ROUND_SECONDS)

    @property
    def in_progress(self) -> int:
        """The number of calls that have not ended."""
        return self.started - sum(self.handled.values())

    def copy(self) -> Self:
        """Returns the counts so far."""
        made = type(self)(self.service, self.method, self.kind)
        made.started, made.handled = self.started, dict(self.handled)
        made.working, made.waiting = self.working.copy(), self.waiting.copy()
        return made

    def end(self, code: str, seconds: float, waited: float) -> None:
        """Counts the end of a call that took so many seconds in all."""
        self.handled[code] = self.handled.get(code, 0) + 1
        if waited:
            self.waiting.observe(waited)
        self.working.observe(seconds - waited)


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
        """Notes the error that a call has ended with."""
        found = self._errors.pop((method, code), None) or RecentError(method, code, "")
        found.message, found.at = message[:_MOST_CHARACTERS], time.monotonic()
        found.count += 1
        self._errors[method, code] = found
        if len(self._errors) > _MOST_ERRORS:
            self._errors.popitem(last=False)
