"""Lines of the log about a call that has a span."""

import json
import logging

from opentelemetry.trace import NonRecordingSpan, SpanContext

from gradserve_server.observe.calls import CallRecord, Origin
from gradserve_server.observe.logs import JsonFormatter, TextFormatter

_TRACE_ID = "0000000000000000000000000000abcd"


def _call(request_id: str = "") -> CallRecord:
    call = CallRecord("gradserve.v1.S.Take", 0.0, lambda: Origin("", request_id))
    call.span = NonRecordingSpan(SpanContext(0xABCD, 0xEF, is_remote=False))
    return call


def _line(formatter: logging.Formatter) -> str:
    return formatter.format(logging.LogRecord("gradserve_server.x", logging.INFO, __file__, 1, "hello", (), None))


def test_json_has_the_ids_of_trace_and_span() -> None:
    _call("of the-client")
    line = json.loads(_line(JsonFormatter()))
    assert (line["trace_id"], line["span_id"]) == (_TRACE_ID, "00000000000000ef")


def test_the_trace_is_the_request_id_unless_the_client_gives_one() -> None:
    _call()
    assert _line(TextFormatter()).endswith(f"hello [{_TRACE_ID}]")
    _call("run-7")
    assert _line(TextFormatter()).endswith("hello [run-7]")


def test_without_a_span_there_are_no_ids() -> None:
    CallRecord("gradserve.v1.S.Take", 0.0)
    assert "trace_id" not in json.loads(_line(JsonFormatter()))
