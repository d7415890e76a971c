"""Lines of the log, as text or as JSON."""

import json
import logging
from datetime import UTC, datetime

from gradserve_server.limits import visible_lines
from gradserve_server.observe.call_record import current_call


class TextFormatter(logging.Formatter):
    """Lines for people: time, level, logger, message, and the id of the request that is being answered.

    A line that begins with a time is the server's own: names, ids and messages of clients can neither begin one nor do
    anything to a terminal, wherever they are, in tracebacks too.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, and what follows of an exception."""
        return visible_lines(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Returns the line without what follows of an exception."""
        line = super().formatMessage(record)
        request_id = _request_id(record)
        return f"{line} [{request_id}]" if request_id else line


class JsonFormatter(logging.Formatter):
    """Lines for programs: an object with time, level, logger, message; further fields where they are known."""

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
        return json.dumps(line, default=str).replace("\x7f", r"\u007f")  # which JSON leaves as it is


def configure(level: str, line_format: str) -> None:
    """Makes the process write its log to the standard error.

    Args:
        level: The lowest level that is logged, e.g. "info".
        line_format: "text" or "json".
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if line_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("numba").setLevel("INFO")  # its debug log has a megabyte for each kernel


def _request_id(record: logging.LogRecord) -> str:
    if not record.name.startswith("gradserve"):
        return ""
    call = current_call()
    return "" if call is None else call.request_id
