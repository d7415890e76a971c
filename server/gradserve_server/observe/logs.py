"""The server's log: text or JSON lines, and lines about failed calls at a bounded rate."""

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from gradserve_protocol.printing import visible, visible_lines
from gradserve_protocol.server_status import LogLine
from gradserve_server.errors import InvalidArgumentError, PermissionDeniedError
from gradserve_server.limits import quoted
from gradserve_server.observe.calls import CallRecord, current_call
from gradserve_server.security.identity import Identity

_log = logging.getLogger("gradserve_server.calls")
_server_log = logging.getLogger("gradserve_server")
LEVELS = ("debug", "info", "warning", "error")
MOST_LINES = 1000
"""The lines of the log that are kept in memory: most take 200 bytes, and none more than 4 KB (ASCII)."""
_MOST_KEPT_CHARACTERS = 4000
_MOST_ANSWERED_CHARACTERS = 1_000_000
_BURST = 5.0
_SECONDS_FOR_ONE = 12.0
_MOST_CHARACTERS = 300
_WARNINGS = frozenset({"RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "PERMISSION_DENIED"})
_ELSEWHERE = frozenset({"INTERNAL"})
"""Codes of the server's own faults, which `rpc.boundary.faults` logs with tracebacks."""


class TextFormatter(logging.Formatter):
    """Lines for people: time, level, logger, message and the current request id.

    Only the server's own lines begin with a time. Names, ids and messages from clients can neither begin a line nor
    control a terminal, not even within tracebacks.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line and any traceback."""
        return visible_lines(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Returns the line without a traceback."""
        line = super().formatMessage(record)
        request_id = _request_id(record)
        return f"{line} [{request_id}]" if request_id else line


class JsonFormatter(logging.Formatter):
    """Lines for programs: an object with time, level, logger, message and any further fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns one line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = _request_id(record)
        if request_id:
            line["request_id"] = request_id
        call = current_call()
        if call is not None and call.span is not None:
            line["trace_id"] = call.trace_id
            line["span_id"] = f"{call.span.get_span_context().span_id:016x}"
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str).replace("\x7f", r"\u007f")  # json does not escape DEL


def configure(level: str, line_format: str) -> None:
    """Configures the process to write its log to standard error.

    Args:
        level: The lowest level to log, e.g. "info".
        line_format: "text" or "json".
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if line_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("numba").setLevel("INFO")  # at debug it writes a megabyte for each kernel


@dataclass(frozen=True, kw_only=True)
class LogRequest:
    """A request for lines of the log.

    Attributes:
        max_lines: The most lines, the latest ones.
        level: The lowest level, one of `LEVELS`; empty for every line.
        contains: A part of the message, of the name of the logger or of the request id, whatever its case.
        after: The number that those of the lines have to exceed.
    """

    max_lines: int = 100
    level: str = ""
    contains: str = ""
    after: int = 0

    def __post_init__(self) -> None:
        """Checks the request.

        Raises:
            InvalidArgumentError: The maximum is out of range, or the level is unknown.
        """
        if not 1 <= self.max_lines <= MOST_LINES:
            raise InvalidArgumentError(f"expected 1 to {MOST_LINES}, got {self.max_lines}", field="max_lines")
        if self.level not in ("", *LEVELS):
            raise InvalidArgumentError(f"expected one of {', '.join(LEVELS)}, got {quoted(self.level)}", field="level")


def check_reader(user: Identity) -> None:
    """Checks that a caller may read the log, which may have names of all containers.

    Raises:
        PermissionDeniedError: It is no admin of all containers.
    """
    if not user.reaches_all:
        raise PermissionDeniedError(
            f'the log needs the role of an admin in all containers ("*"); {user.name!r} has not got it', code="GS_ROLE"
        )


class LogMemory(logging.Handler):
    """The latest lines of the server's log, whatever the process does with its log otherwise.

    Loggers belong to the process: servers of one process have the same lines. Thread-safe.
    """

    def __init__(self, most: int = MOST_LINES) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque(maxlen=most)
        self._last_number = 0
        self._formatter = logging.Formatter()

    def open(self) -> None:
        """Begins to keep lines."""
        _server_log.addHandler(self)

    def close(self) -> None:
        """Ends it."""
        _server_log.removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a line. Called with the lock held."""
        try:
            message = self._formatter.format(record)
        except Exception:
            self.handleError(record)
            return
        if len(message) > _MOST_KEPT_CHARACTERS:
            message = f"{message[:_MOST_KEPT_CHARACTERS]} ..."
        self._last_number += 1
        self._lines.append(
            LogLine(self._last_number, record.created, record.levelname, record.name, message, _request_id(record))
        )

    def latest(self, request: LogRequest) -> tuple[LogLine, ...]:
        """Returns the latest lines that a request asks for, the oldest first; a million characters at most."""
        self.acquire()
        try:
            lines = list(self._lines)
        finally:
            self.release()
        levels, wanted = logging.getLevelNamesMapping(), request.contains.casefold()
        least = levels[request.level.upper()] if request.level else 0
        found: deque[LogLine] = deque()
        num_characters = 0
        for each in reversed(lines):
            if each.number <= request.after or len(found) == request.max_lines:
                break
            if levels.get(each.level, least) < least:
                continue
            if wanted not in f"{each.message}\n{each.logger}\n{each.request_id}".casefold():
                continue
            num_characters += len(each.message)
            if num_characters > _MOST_ANSWERED_CHARACTERS:
                break
            found.appendleft(each)
        return tuple(found)


class FailureLog:
    """Logs failed calls: for each method and code a burst of five, then one every twelve seconds.

    The next line says how many were left out. Used on the event loop only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._allowances: dict[tuple[str, str], _Allowance] = {}

    def failed(self, call: CallRecord, code: str, message: str) -> None:
        """Logs that a call ended with an error, unless there were too many like it."""
        level = logging.WARNING if code in _WARNINGS else logging.INFO
        if code in _ELSEWHERE or not _log.isEnabledFor(level):
            return
        now = self._clock()
        # Clients cannot make it grow: there is one entry for each method and code.
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


@dataclass(slots=True)
class _Allowance:
    lines: float = _BURST
    since: float = 0.0
    num_left_out: int = 0


def _request_id(record: logging.LogRecord) -> str:
    if not record.name.startswith("gradserve"):
        return ""
    call = current_call()
    return "" if call is None else call.request_id


def _short(message: str) -> str:
    shown = visible(message[: _MOST_CHARACTERS + 1])
    return shown if len(shown) <= _MOST_CHARACTERS else f"{shown[:_MOST_CHARACTERS]} ..."
