"""The server's log."""

import json
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import gradserve
from gradserve_protocol.v1 import accumulator_messages_pb2, accumulator_pb2
from gradserve_server.app import Server
from gradserve_server.config import ServerConfig
from gradserve_server.observe import observed
from gradserve_server.observe.calls import CallRecord, Origin
from gradserve_server.observe.logs import FailureLog, JsonFormatter, LogMemory, LogRequest, TextFormatter
from gradserve_testing import LocalServer
from tests.security.serving import TOKENS
from tests.servers.command_line import run_cli
from tests.servers.polling import eventually
from tests.servers.runtime import NOT_WARMED_UP

_CALLS = "gradserve_server.calls"


@pytest.fixture(scope="module")
def local() -> Iterator[LocalServer]:
    """A server whose minutes end when a test says so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observed, "EVERY_SECONDS", 1e6)
        with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)) as server:
            yield server


def record_of(message: str, *, failed: bool = False, **extra: object) -> logging.LogRecord:
    exception = None
    if failed:
        try:
            int("no number")
        except ValueError:
            exception = sys.exc_info()
    record = logging.LogRecord("gradserve_server.x", logging.INFO, __file__, 1, message, (), exception)
    vars(record).update(extra)
    return record


def test_the_latest_lines_are_kept_and_long_ones_cut() -> None:
    memory = LogMemory(most=2)
    for message in ("first", "second", "x" * 5000):
        memory.handle(record_of(message))
    lines = memory.latest(LogRequest())
    assert [(each.number, each.message[:6], len(each.message)) for each in lines] == [
        (2, "second", 6),
        (3, "xxxxxx", 4004),
    ]
    assert [each.number for each in memory.latest(LogRequest(max_lines=1))] == [3]


def test_an_answer_has_a_million_characters_at_most() -> None:
    memory = LogMemory()
    for _ in range(300):
        memory.handle(record_of("x" * 4000))
    assert [each.number for each in memory.latest(LogRequest(max_lines=1000))] == list(range(51, 301))


def test_a_server_that_has_ended_keeps_no_lines() -> None:
    handlers = list(logging.getLogger("gradserve_server").handlers)
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP)):
        assert len(logging.getLogger("gradserve_server").handlers) == len(handlers) + 1
    assert logging.getLogger("gradserve_server").handlers == handlers


def test_lines_as_json_are_objects_with_all_that_is_known() -> None:
    call = CallRecord("gradserve.v1.S.Take", 0.0, lambda: Origin("ipv4:1.2.3.4:5", "of the client"))
    line = json.loads(JsonFormatter().format(record_of("two\nlines", failed=True, fields={"code": "NOT_FOUND"})))
    assert line["message"] == "two\nlines"
    assert (line["level"], line["logger"], line["code"]) == ("INFO", "gradserve_server.x", "NOT_FOUND")
    assert line["request_id"] == call.request_id
    assert line["exception"].endswith("'no number'")
    assert line["time"].endswith("+00:00")


def test_lines_as_text_end_with_the_id_of_the_request_while_it_is_answered() -> None:
    call = CallRecord("gradserve.v1.S.Take", 0.0, lambda: Origin("", "abc-1"))
    assert TextFormatter().format(record_of("hello")).endswith(" INFO gradserve_server.x: hello [abc-1]")
    call.has_ended = True
    assert TextFormatter().format(record_of("hello")).endswith(" INFO gradserve_server.x: hello")


@pytest.mark.parametrize("given", ["", "with space", "x" * 65, "line\nbreak", "\u00e9"])
def test_an_id_that_is_not_short_and_plain_is_replaced(given: str) -> None:
    call = CallRecord("m", 0.0, lambda: Origin("", given))
    assert len(call.request_id) == 12
    assert call.request_id == call.request_id


def test_a_refused_call_is_a_line(local: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=_CALLS)
    channel = grpc.insecure_channel(local.address)
    get: Any = channel.unary_unary(
        "/gradserve.v1.AccumulatorService/GetAccumulator",
        request_serializer=accumulator_messages_pb2.GetAccumulatorRequest.SerializeToString,
    )
    request = accumulator_messages_pb2.GetAccumulatorRequest(
        accumulator=accumulator_pb2.AccumulatorRef(container="logs", name="nothing here")
    )
    with pytest.raises(grpc.RpcError):
        get(request, metadata=(("x-request-id", "run-7"),))
    channel.close()
    (record,) = [each for each in caplog.records if "nothing here" in each.getMessage()]
    assert record.getMessage().startswith("GetAccumulator from ipv4:127.0.0.1:")
    assert record.getMessage().endswith(": NOT_FOUND: no accumulator 'logs/nothing here'")
    fields = vars(record)["fields"]
    assert (fields["code"], fields["identity"], fields["left_out"]) == ("NOT_FOUND", "", 0)


@pytest.mark.parametrize("way", ["bulk", "shared_memory"])
def test_a_refused_call_on_a_socket_is_a_line_too(
    local: LocalServer, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    caplog.set_level(logging.INFO, logger=_CALLS)
    with gradserve.connect(local.address, transport=way) as client:  # type: ignore[arg-type]
        acc = client.conditional_accumulator("float32", (2,), shared_name=f"logs/{way}")
        with pytest.raises(gradserve.InvalidArgumentError):
            acc.apply_grad(np.ones(3, np.float32))
    (record,) = [each for each in caplog.records if "expected [2], got [3]" in each.getMessage()]
    origin = "process " if way == "shared_memory" else "127.0.0.1:"
    assert record.getMessage().startswith(f"ApplyGradient from {origin}")


def test_lines_about_calls_of_one_kind_are_few(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=_CALLS)
    now = 0.0
    failures = FailureLog(lambda: now)
    for _ in range(100):
        failures.failed(CallRecord("gradserve.v1.S.M", now), "NOT_FOUND", "no such thing")
    assert len(caplog.records) == 5
    now = 13.0
    failures.failed(CallRecord("gradserve.v1.S.M", now), "NOT_FOUND", "no such thing")
    assert caplog.records[-1].getMessage().endswith("NOT_FOUND: no such thing (95 more like it were left out)")
    failures.failed(CallRecord("gradserve.v1.S.M", now), "ABORTED", "another code")
    assert len(caplog.records) == 7


def test_messages_are_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=_CALLS)
    forged = "x\n2026-11-23 INFO all is well\x1b[2J" + "y" * 1000
    FailureLog().failed(CallRecord("gradserve.v1.S.M", 0.0), "NOT_FOUND", forged)
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    assert "\x1b" not in record.getMessage()
    assert record.getMessage().endswith("yyy ...")
    assert len(record.getMessage()) < 400


@pytest.mark.parametrize("code", ["UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"])
def test_what_an_operator_may_have_to_act_on_is_a_warning(caplog: pytest.LogCaptureFixture, code: str) -> None:
    FailureLog().failed(CallRecord("gradserve.v1.S.M", 0.0), code, "no")
    (record,) = caplog.records
    assert record.levelname == "WARNING"


def test_no_token_is_ever_in_the_log(guarded: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    unknown = "gradserve_" + "q" * 43
    for token in (unknown, TOKENS["worker"]):
        with (
            gradserve.connect(guarded.address, token=token, transport="grpc") as client,
            pytest.raises(gradserve.GradserveError),
        ):
            client.conditional_accumulator("float32", (), shared_name="secret", container="elsewhere")
    text = "\n".join(each.getMessage() for each in caplog.records)
    assert "UNAUTHENTICATED" in text
    assert "'worker' has no role there" in text
    assert unknown not in text
    assert TOKENS["worker"] not in text


def test_debug_shows_each_call(local: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger=_CALLS)
    with gradserve.connect(local.address, transport="grpc") as client:
        client.server_info()
    eventually(lambda: any("ServerService.GetServerInfo: OK after" in each.getMessage() for each in caplog.records))


def test_debug_shows_each_round(local: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="gradserve_server.rounds")
    with gradserve.connect(local.address) as client:
        acc = client.conditional_accumulator("float32", (), shared_name="logs/rounds")
        acc.apply_grad(1.0, worker_id="w")
        acc.take_grad(1)
    (record,) = caplog.records
    assert record.getMessage().startswith("default/logs/rounds: 1 gradients led to step 1 after ")


def end_minute(local: LocalServer, caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Returns what a server logs at the end of a minute, without what other servers of the process log."""
    caplog.clear()

    def log(server: Server) -> int:
        server.summary.log()
        return threading.get_ident()

    thread = local.inspect(log)
    return [each for each in caplog.records if each.thread == thread]


def test_a_minute_with_calls_is_one_line_and_one_without_none(
    local: LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="gradserve_server.summary")
    end_minute(local, caplog)
    with gradserve.connect(local.address, transport="grpc") as client:
        acc = client.conditional_accumulator("float32", (), shared_name="logs/summary")
        acc.apply_grad(1.0)
        acc.take_grad(1)
    (record,) = end_minute(local, caplog)
    fields = vars(record)["fields"]
    assert (fields["rounds"], fields["accepted"], fields["stale"]) == (1, 1, 0)
    assert record.getMessage().startswith("last minute: ")
    assert end_minute(local, caplog) == []


def test_the_command_line_chooses_the_format() -> None:
    done = run_cli("serve", "--listen", "127.0.0.1:0", "--log-format", "xml")
    assert done.returncode == 2
    assert "--log-format: expected text or json, got 'xml'" in done.stderr
