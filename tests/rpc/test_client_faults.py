"""Nothing that a client does fills the server's log, or keeps the server from serving others."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

import gradserve
import gradserve.aio
from gradserve.testing import ServerProcess
from gradserve_protocol.v1 import tensor_messages_pb2
from gradserve_server.config import LimitsConfig
from gradserve_server.errors import NotFoundError
from gradserve_server.rpc.boundary.chain import Service
from gradserve_server.rpc.boundary.interceptors import Faults
from gradserve_server.rpc.listeners.grpc.flow import Traffic
from gradserve_server.rpc.listeners.grpc.listener import ClientFaults, make_handler
from tests.servers.polling import eventually, eventually_async
from tests.servers.raw_calls import METHODS
from tests.servers.raw_http2 import (
    CANCEL,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    HELLO,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    call,
    field,
    frame,
    headers,
    message,
    request_fields,
    send,
)

_LISTEN_SECONDS = 0.01


def path_of(method: str) -> str:
    return f"/{METHODS[method].containing_service.full_name}/{method}"


INFO, APPLY, PUT, GET = map(path_of, ("GetServerInfo", "ApplyGradient", "PutTensors", "GetTensors"))
HEALTH, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
RANDOM = random.Random(11).randbytes(300)
NOT_UTF8 = b"\xff\xfe"

BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "garbage": RANDOM,
    "the hello of TLS": bytes.fromhex("1603010200010001fc0303") + RANDOM,
    "HTTP/1": b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
    "half a preface": PREFACE[:10],
    "no settings": PREFACE,
    "garbage after the settings": HELLO + RANDOM,
    "half a frame": HELLO + headers(request_fields(INFO))[:20],
    "a frame of 16 MiB": HELLO + b"\xff\xff\xff\0\0\0\0\0\1",
    "garbage for headers": HELLO + headers(b"\xff" * 6),
    "headers, and no message": HELLO + headers(request_fields(INFO)),
    "the end instead of a message": HELLO + headers(request_fields(INFO), flags=END_HEADERS | END_STREAM),
    "half a message": HELLO + headers(request_fields(APPLY)) + frame(DATA, 0, 1, message(b"abc", length=100)),
    "the end in a message": HELLO
    + headers(request_fields(APPLY))
    + frame(DATA, END_STREAM, 1, message(b"abc", length=100)),
    "a message of 2 GiB": HELLO + headers(request_fields(APPLY)) + frame(DATA, 0, 1, message(b"abc", length=1 << 31)),
    "two messages": HELLO + headers(request_fields(INFO)) + frame(DATA, END_STREAM, 1, message(b"") * 2),
    "a message that is not compressed as it says": HELLO
    + headers(request_fields(INFO, {"grpc-encoding": "gzip"}))
    + frame(DATA, END_STREAM, 1, message(b"abc", flag=1)),
    "an unknown compression": HELLO + call(INFO, b"", {"grpc-encoding": "other"}),
    "an unknown flag of a message": HELLO
    + headers(request_fields(INFO))
    + frame(DATA, END_STREAM, 1, message(b"abc", flag=7)),
    "gone without the answer": HELLO + call(INFO, b""),
    "gone without the error": HELLO + call(APPLY, b""),
    "gone without the error of a stream": HELLO + call(GET, b"\x0a\x01x"),
    "a message that is not protobuf": HELLO + call(INFO, NOT_UTF8),
    "cancelled before the message": HELLO + headers(request_fields(INFO)) + frame(RST_STREAM, 0, 1, CANCEL),
    "cancelled before the answer": HELLO + call(INFO, b"") + frame(RST_STREAM, 0, 1, CANCEL),
    "cancelled before the error": HELLO + call(APPLY, b"") + frame(RST_STREAM, 0, 1, CANCEL),
    "calls cancelled one after the other": HELLO
    + b"".join(call(APPLY, b"", stream=stream) + frame(RST_STREAM, 0, stream, CANCEL) for stream in range(1, 600, 2)),
    "gone away": HELLO + call(INFO, b"") + frame(GOAWAY, payload=bytes(8)),
    "pings": HELLO + frame(PING, payload=bytes(8)) * 300,
    "settings": HELLO + frame(SETTINGS) * 300,
    "half a setting": HELLO + frame(SETTINGS, payload=b"\0\5\0"),
    "settings that cannot be": HELLO + frame(SETTINGS, payload=b"\0\5\0\0\0\0"),
    "a window without end": HELLO + frame(WINDOW_UPDATE, payload=b"\x7f\xff\xff\xff") * 3,
    "a window of nothing": HELLO + frame(WINDOW_UPDATE, payload=bytes(4)),
    "a push": HELLO + frame(PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2" + request_fields(INFO)),
    "a priority": HELLO + frame(PRIORITY, 0, 1, b"\0\0\0\1\0"),
    "a stream of the server's": HELLO + headers(request_fields(INFO), stream=2),
    "data of no stream": HELLO + frame(DATA, 0, 7, b"abc"),
    "a stream used twice": HELLO + headers(request_fields(INFO), flags=END_HEADERS | END_STREAM) * 2,
    "trailers": HELLO + headers(request_fields(INFO)) + headers(field("a", "b"), flags=END_HEADERS | END_STREAM),
    "many uploads that do not begin": HELLO
    + b"".join(headers(request_fields(PUT), stream) for stream in range(1, 600, 2)),
    "an upload that does not go on": HELLO + headers(request_fields(PUT)) + frame(DATA, 0, 1, message(b"\x0a\2\x0a\0")),
    "garbage for an upload": HELLO + headers(request_fields(PUT)) + frame(DATA, 0, 1, message(RANDOM)),
    "no path": HELLO + headers(field(":method", "POST"), flags=END_HEADERS | END_STREAM),
    "another HTTP method": HELLO + headers(request_fields(INFO, method="GET"), flags=END_HEADERS | END_STREAM),
    "another scheme": HELLO + headers(request_fields(INFO, scheme="other")),
    "no trailers": HELLO + headers(request_fields(INFO, te="other")),
    "another content": HELLO + headers(request_fields(INFO, content_type="text/html")),
    "an authority that is not UTF-8": HELLO + headers(request_fields(INFO, authority=NOT_UTF8)),
    "an unknown method": HELLO + call("/some.Service/Method", b""),
    "an empty path": HELLO + call("", b""),
    "a path without a slash": HELLO + call("method", b""),
    "a long path": HELLO + call("/" + "x" * 7000, b""),
    "a path of two lines": HELLO + call("/a\r\nb/c", b""),
    "a path with a NUL": HELLO + call("/a\0b/c", b""),
    "a path that is not ASCII": HELLO + call("/ä/ö", b""),
    "a deadline that is no time": HELLO + call(INFO, b"", {"grpc-timeout": "soon"}),
    "a deadline that is over": HELLO + call(INFO, b"", {"grpc-timeout": "1n"}),
    "a deadline in 10,000 years": HELLO + call(INFO, b"", {"grpc-timeout": "99999999H"}),
    "attempts that are no number": HELLO + call(INFO, b"", {"grpc-previous-rpc-attempts": "many"}),
    "metadata that is not UTF-8": HELLO + call(INFO, b"", {"some": NOT_UTF8}),
    "a key that is not UTF-8": HELLO + call(INFO, b"", {b"key-" + NOT_UTF8: "some"}),
    "a user agent that is not UTF-8": HELLO + call(INFO, b"", {"user-agent": NOT_UTF8}),
    "metadata of two lines": HELLO + call(INFO, b"", {"some": "a\r\nb"}),
    "an empty key": HELLO + call(INFO, b"", {"": "some"}),
    "a key in upper case": HELLO + call(INFO, b"", {"Key": "some"}),
    "binary metadata that is not": HELLO + call(INFO, b"", {"some-bin": "!!!"}),
    "much metadata": HELLO
    + frame(HEADERS, 0, 1, request_fields(INFO))
    + frame(CONTINUATION, 0, 1, field("some", "x" * 10_000)) * 20
    + frame(CONTINUATION, END_HEADERS, 1),
    "garbage for a health check": HELLO + call(HEALTH, NOT_UTF8),
    "a service that is not UTF-8": HELLO + call(HEALTH, b"\x0a\2" + NOT_UTF8),
    "the health of an unknown service": HELLO + call(WATCH, b"\x0a\2zz"),
    "garbage for the reflection": HELLO + call(REFLECTION, NOT_UTF8),
    "nothing for the reflection": HELLO + call(REFLECTION, b""),
    "an unknown extension for the reflection": HELLO + call(REFLECTION, b"\x2a\3\x0a\1x"),
}


def expected_lines(log: str) -> list[str]:
    """Returns the lines of a log that are not those of a start, an end, and requests that were refused."""
    usual = (
        ": serving on ",
        ": draining",
        ": stopped",
        ": kernels prepared in ",
        ": preparing kernels: ",
        " INFO gradserve_server.calls: ",
    )
    return [line for line in log.splitlines() if not any(words in line for words in usual)]


@pytest.fixture
def quiet_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's core writes nothing to the standard error of processes started from now on."""
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")


@pytest.mark.usefixtures("quiet_core")
def test_what_is_broken_leaves_no_trace(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--warm-up", "false") as process, gradserve.connect(process.address) as client:
        for name, data in BROKEN.items():
            for reset in (False, True):
                for listen in (0, _LISTEN_SECONDS):
                    send(process.address, data, reset=reset, listen=listen)
            assert client.server_info().version, name
        # A new connection, too.
        with gradserve.connect(process.address) as newcomer:
            eventually(newcomer.server_info, lambda info: info.usage["num_handles"] == 0)
    assert expected_lines(process.log) == []


@pytest.mark.usefixtures("quiet_core")
async def test_who_leaves_in_a_download_leaves_no_trace(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--warm-up", "false") as process:
        async with gradserve.aio.connect(process.address) as client:
            stored = await client.put(np.zeros(8 << 20, np.uint8))

            async def leave(after: int) -> None:
                options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
                async with grpc.aio.insecure_channel(process.address, options=options) as channel:
                    request = tensor_messages_pb2.GetTensorsRequest(handles=[stored.handle])
                    call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(GET)
                    download = call(request.SerializeToString())
                    for _ in range(after):
                        await download.read()

            for _ in range(10):
                await asyncio.gather(*(leave(number % 4) for number in range(20)))
            await client.get(stored, release=True)
            await eventually_async(client.server_info, lambda info: info.usage["num_handles"] == 0)
    assert expected_lines(process.log) == []


class Gone:
    """The context of a call whose client has left."""

    def time_remaining(self) -> None:
        return None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def add_done_callback(self, _: object) -> None:
        pass

    async def read(self) -> bytes:
        return b""

    async def abort(self, *_: object) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch"')

    async def write(self, _: object) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch"')


class Servicer:
    """Raises an error where one response is expected, and answers a stream."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def __getattr__(self, method: str) -> Any:
        return self._stream if METHODS[method].server_streaming else self._unary

    async def _unary(self, request: Any, call: Any) -> Any:
        assert self._error is not None
        raise self._error

    async def _stream(self, request: Any, call: Any) -> AsyncIterator[Any]:
        yield tensor_messages_pb2.GetTensorsResponse()


def handler_of(method: str, servicer: Servicer) -> Any:
    service: Any = METHODS[method].containing_service
    details: Any = SimpleNamespace(method=path_of(method))
    return make_handler(Service(service, servicer, (Faults(),)), Traffic.within(LimitsConfig())).service(details)


def own_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Returns what the server logged, without what asyncio says about a loop that other tests left busy."""
    return [record for record in caplog.records if record.name.startswith("gradserve_server")]


@pytest.mark.parametrize("error", [NotFoundError("no such handle"), ValueError("a fault")], ids=["expected", "fault"])
async def test_an_error_that_nobody_waits_for(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(asyncio.CancelledError):
        await handler_of("GetServerInfo", Servicer(error)).stream_unary(None, Gone())
    levels = [(record.levelname, record.exc_info is not None) for record in own_records(caplog)]
    assert levels == [("DEBUG", False)] if isinstance(error, NotFoundError) else [("ERROR", True), ("DEBUG", False)]


async def test_a_response_that_nobody_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(asyncio.CancelledError):
        await handler_of("GetTensors", Servicer()).stream_stream(None, Gone())
    assert [(record.levelname, record.exc_info) for record in own_records(caplog)] == [("DEBUG", None)]


def raised(error: Exception, where: str) -> Exception:
    """Returns an error with the traceback that it has when code of a file raises it."""
    try:
        exec(compile("raise error", where, "exec"), {"error": error.with_traceback(None)})  # noqa: S102
    except Exception as seen:
        return seen
    raise AssertionError("it raises")


IN_GRPC = "src/python/grpcio/grpc/_cython/_cygrpc/aio/server.pyx.pxi"
BATCH = grpc.aio.InternalError('Failed "execute_batch"')
BAD_TEXT = UnicodeDecodeError("utf-8", NOT_UTF8, 0, 1, "invalid start byte")


@pytest.mark.parametrize(
    ("error", "where", "level"),
    [
        (BATCH, IN_GRPC, logging.DEBUG),
        (BAD_TEXT, IN_GRPC, logging.DEBUG),
        (BAD_TEXT, "a/program/of/somebody.py", logging.ERROR),
        (RuntimeError("a fault"), IN_GRPC, logging.ERROR),
    ],
    ids=["batch", "text", "text elsewhere", "fault"],
)
@pytest.mark.parametrize("as_message", [False, True])
def test_what_grpc_logs(
    error: Exception, where: str, level: int, as_message: bool, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("test_client_faults")
    log.addFilter(ClientFaults())
    seen = raised(error, where)
    for threshold in (logging.DEBUG, logging.INFO):
        caplog.clear()
        with caplog.at_level(threshold):
            if as_message:
                log.exception(seen)
            else:
                log.error("something failed", exc_info=seen)
        assert [record.levelno for record in caplog.records] == ([level] if level >= threshold else [])
        if level == logging.DEBUG:
            assert not any(record.exc_info for record in caplog.records)
