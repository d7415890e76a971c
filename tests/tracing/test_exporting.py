"""`gradserve serve --tracing` sends its spans to a collector."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans

import gradserve
from gradserve.testing import ServerProcess
from tests.servers.command_line import run_cli
from tests.servers.polling import PATIENCE_SECONDS


class Collector:
    """A collector of OTLP over HTTP, without compression.

    Attributes:
        url: Its endpoint.
        received: What it was sent.
    """

    def __init__(self) -> None:
        received: list[ResourceSpans] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/traces":
                    received.extend(ExportTraceServiceRequest.FromString(body).resource_spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.received = received
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def names(self) -> set[str]:
        """The names of the spans."""
        return {span.name for each in self.received for scope in each.scope_spans for span in scope.spans}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Answers until the end of the block."""
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


def _one_round(address: str) -> None:
    with gradserve.connect(address) as client:
        net = client.gradient_accumulator({"w": np.zeros(3, np.float32)}, shared_name="net")
        net.push_pull({"w": np.ones(3, np.float32)}, 1, 0)


def test_what_is_left_is_sent_when_the_server_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    with collector.running(), ServerProcess(tmp_path, "--tracing", "true", "--warm-up", "false") as server:
        _one_round(server.address)
        server.process.terminate()
        assert server.process.wait(PATIENCE_SECONDS) == 0
    assert {"gradserve.v1.AccumulatorService/PushPull", "gradserve.round"} <= collector.names
    resource = {each.key: each.value.string_value for each in collector.received[0].resource.attributes}
    assert (resource["service.name"], resource["service.version"]) == ("gradserve", gradserve.__version__)


def test_a_collector_that_does_not_answer_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with ServerProcess(tmp_path, "--tracing", "true", "--warm-up", "false") as server:
            _one_round(server.address)
            server.process.terminate()
            assert server.process.wait(PATIENCE_SECONDS) == 0
            assert "the last spans are lost" in server.log


def test_on_the_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with ServerProcess(tmp_path, "--tracing", "true", "--warm-up", "false") as server:
        _one_round(server.address)
        server.process.terminate()
        server.process.wait(PATIENCE_SECONDS)
        assert '"name": "gradserve.round"' in server.log
        assert '"service.name": "mine"' in server.log


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "OTEL_TRACES_EXPORTER: expected otlp or console, got 'zipkin'"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL: expected http/protobuf, got 'grpc'"),
    ],
)
def test_what_is_not_possible_is_an_error_at_the_start(variable: str, value: str, expected: str) -> None:
    done = run_cli("serve", "--tracing", "true", env={variable: value})
    assert done.returncode == 2
    assert expected in done.stderr
