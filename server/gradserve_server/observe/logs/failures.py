"""Lines about calls that were refused or have failed, at a bounded rate."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from gradserve_server.limits import visible
from gradserve_server.observe.call_record import CallRecord

_log = logging.getLogger("gradserve_server.calls")

_BURST = 5.0
_SECONDS_FOR_ONE = 12.0
_MOST_CHARACTERS = 300
_WARNINGS = frozenset({"RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "PERMISSION_DENIED"})
_ELSEWHERE = frozenset({"INTERNAL"})
"""Codes of faults of the server, which are logged with their tracebacks."""


@dataclass(slots=True)
class _Allowance:
    lines: float = _BURST
    since: float = 0.0
    num_left_out: int = 0


class FailureLog:
    """Logs failed calls: of each method and code five at once, and then one every twelve seconds.

    The next line says how many were left out. Used on the event loop only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes the clock."""
        self._clock = clock
        self._allowances: dict[tuple[str, str], _Allowance] = {}

    def failed(self, call: CallRecord, code: str, message: str) -> None:
        """Logs that a call has ended with an error, unless there were too many like it."""
        level = logging.WARNING if code in _WARNINGS else logging.INFO
        if code in _ELSEWHERE or not _log.isEnabledFor(level):
            return
        now = self._clock()
        # As many as there are methods and codes, whatever clients do.
        allowance = self._allowances.setdefault((call.method, code), _Allowance(since=now))
        earned = (now - allowance.since) / _SECONDS_FOR_ONE
        allowance.lines, allowance.since = min(allowance.lines + earned, _BURST), now
        if allowance.lines < 1.0:
            allowance.num_left_out += 1
            return
        allowance.lines -= 1.0
        left_out, allowance.num_left_out = allowance.num_left_out, 0
        origin = call.origin()
        fields = {
            "method": call.method,
            "code": code,
            "identity": call.identity,
            "peer": origin.peer,
            "seconds": round(now - call.began, 6),
            "left_out": left_out,
        }
        _log.log(
            level,
            "%s from %s%s: %s: %s%s",
            call.method.rpartition(".")[2],
            origin.peer or "an unknown peer",
            f" ({call.identity})" if call.identity else "",
            code,
            _short(message),
            f" ({left_out} more like it were left out)" if left_out else "",
            extra={"fields": fields},
        )


def _short(message: str) -> str:
    shown = visible(message[: _MOST_CHARACTERS + 1])
    return shown if len(shown) <= _MOST_CHARACTERS else f"{shown[:_MOST_CHARACTERS]} ..."
