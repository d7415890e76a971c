"""Spans of calls, over every way and with both faces."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

import gradserve
import gradserve.aio
from gradserve.testing import Faults
from gradserve.transport.settings import TransportName
from gradserve_server.config import ServerConfig
from gradserve_server.parts import Parts
from gradserve_testing import LocalServer
from tests.servers.runtime import NOT_WARMED_UP
from tests.tracing.spans import ACCUMULATORS, TENSORS, WAIT, Spans, context_of, is_child

over_every_way = pytest.mark.parametrize("way", ["grpc", "bulk", "shared_memory"])


def _blocking(server: LocalServer, spans: Spans, way: TransportName) -> None:
    with gradserve.connect(server.address, transport=way, tracing=spans.provider) as client:
        net = client.gradient_accumulator({"w": np.zeros(3, np.float32)}, shared_name="net")
        net.push_pull({"w": np.ones(3, np.float32)}, 1, 0, worker_id="a")


def _with_asyncio(server: LocalServer, spans: Spans, way: TransportName) -> None:
    async def run() -> None:
        async with gradserve.aio.connect(server.address, transport=way, tracing=spans.provider) as client:
            net = await client.gradient_accumulator({"w": np.zeros(3, np.float32)}, shared_name="net")
            await net.push_pull({"w": np.ones(3, np.float32)}, 1, 0, worker_id="a")

    asyncio.run(run())


@over_every_way
@pytest.mark.parametrize("face", [_blocking, _with_asyncio], ids=["blocking", "asyncio"])
def test_the_span_of_the_server_is_a_child_of_that_of_the_client(
    traced_server: LocalServer, spans: Spans, face: Callable[[LocalServer, Spans, Any], None], way: TransportName
) -> None:
    with trace.get_tracer("test", tracer_provider=spans.provider).start_as_current_span("step"):
        face(traced_server, spans, way)
    client, server = spans.call(ACCUMULATORS + "PushPull")
    (step,) = spans.of("step")
    assert is_child(client, step)
    assert is_child(server, client)
    assert server.start_time is not None
    assert client.start_time is not None
    assert client.start_time <= server.start_time
    about = {
        "rpc.system.name": "grpc",
        "rpc.method": "gradserve.v1.AccumulatorService/PushPull",
        "rpc.response.status_code": "OK",
        "gradserve.accumulator": "net",
        "gradserve.container": "default",
        "gradserve.worker_id": "a",
        "gradserve.local_step": 0,
        "gradserve.num_required": 1,
    }
    assert dict(client.attributes or {}) == {**about, "gradserve.way": way}
    seen = dict(server.attributes or {})
    assert seen.pop("client.address")
    assert seen == {**about, "gradserve.outcome": "ACCEPTED", "gradserve.global_step": 1}
    assert {server.status.status_code, client.status.status_code} == {StatusCode.UNSET}


@pytest.mark.parametrize("progress", [None, lambda done, total: None], ids=["", "with progress"])
def test_streams(traced_server: LocalServer, spans: Spans, progress: Callable[[int, int], None] | None) -> None:
    with gradserve.connect(traced_server.address, transport="grpc", tracing=spans.provider) as client:
        client.get(client.put(np.zeros(1 << 20, np.float32), progress=progress), progress=progress)
    for method in ("PutTensors", "GetTensors"):
        client_span, server_span = spans.call(TENSORS + method)
        assert is_child(server_span, client_span)
        assert (client_span.attributes or {})["gradserve.bytes"] == 4 << 20


@over_every_way
def test_an_error_of_the_caller(traced_server: LocalServer, spans: Spans, way: TransportName) -> None:
    with gradserve.connect(traced_server.address, transport=way, tracing=spans.provider) as client:
        net = client.gradient_accumulator({"w": np.zeros(3, np.float32)}, shared_name="net")
        with pytest.raises(gradserve.InvalidArgumentError):
            net.apply_grad({"w": np.ones(3, np.float32)}, -(1 << 63), weight=float("nan"))
        with pytest.raises(gradserve.OutOfRangeError):
            net.read_average(-5)
    client_span, server_span = spans.call(ACCUMULATORS + "ReadAverage")
    for span in (client_span, server_span):
        assert (span.attributes or {})["rpc.response.status_code"] == "OUT_OF_RANGE"
        assert (span.attributes or {})["error.type"] == "OUT_OF_RANGE"
    assert client_span.status.status_code is StatusCode.ERROR
    assert client_span.status.description
    assert server_span.status.status_code is StatusCode.UNSET, "it is no fault of the server"


@over_every_way
def test_a_fault_of_the_server(spans: Spans, way: TransportName) -> None:
    faults = Faults()
    parts = Parts(tracer_provider=spans.provider, interceptors=(faults,))
    with (
        LocalServer(ServerConfig(runtime=NOT_WARMED_UP), parts) as local,
        gradserve.connect(local.address, transport=way, tracing=spans.provider) as client,
    ):
        net = client.gradient_accumulator({"w": np.zeros(3, np.float32)}, shared_name="net")
        faults.drop_reply("ApplyGradient")
        net.apply_grad({"w": np.ones(3, np.float32)}, 0)
    failed, repeated = spans.of(ACCUMULATORS + "ApplyGradient", SpanKind.CLIENT, number=2)
    assert failed.status.status_code is StatusCode.ERROR
    assert repeated.status.status_code is StatusCode.UNSET
    answers = spans.of(ACCUMULATORS + "ApplyGradient", SpanKind.SERVER, number=2)
    assert [span.status.status_code for span in answers] == [StatusCode.ERROR, StatusCode.UNSET]
    assert is_child(answers[0], failed)
    assert is_child(answers[1], repeated)


def test_a_wait_that_is_too_long(traced_server: LocalServer, spans: Spans) -> None:
    with gradserve.connect(traced_server.address, tracing=spans.provider) as client:
        net = client.gradient_accumulator({"w": np.zeros(3, np.float32)}, shared_name="net")
        with pytest.raises(gradserve.DeadlineExceededError):
            net.take_grad(1, timeout=0.05)
    client_span, server_span = spans.call(ACCUMULATORS + "TakeGradient")
    (wait,) = spans.of(WAIT)
    assert is_child(wait, server_span)
    assert (wait.attributes or {})["error.type"] == "TimeoutError"
    assert (server_span.attributes or {})["rpc.response.status_code"] == "DEADLINE_EXCEEDED"
    assert server_span.status.status_code is client_span.status.status_code is StatusCode.ERROR


def test_without_traces_of_the_client_the_server_begins_its_own(traced_server: LocalServer, spans: Spans) -> None:
    with gradserve.connect(traced_server.address) as client:
        client.conditional_accumulator("float32", shape=(), shared_name="w")
    (created,) = spans.of(ACCUMULATORS + "CreateAccumulator", SpanKind.SERVER)
    assert created.parent is None


def test_without_traces_of_the_server_the_client_has_its_own(server_address: str, spans: Spans, name: str) -> None:
    with gradserve.connect(server_address, tracing=spans.provider) as client:
        client.conditional_accumulator("float32", shape=(), shared_name=name)
    assert {span.kind for span in spans.all} == {SpanKind.CLIENT}


@over_every_way
def test_spans_that_are_not_sampled_are_not_recorded_by_the_server(
    traced_server: LocalServer, spans: Spans, way: TransportName
) -> None:
    unsampled = trace.SpanContext(1, 1, is_remote=False, trace_flags=trace.TraceFlags(0))
    with (
        trace.use_span(trace.NonRecordingSpan(unsampled)),
        gradserve.connect(traced_server.address, transport=way, tracing=spans.provider) as client,
    ):
        net = client.gradient_accumulator({"w": np.zeros(3, np.float32)}, shared_name="net")
        net.push_pull({"w": np.ones(3, np.float32)}, 1, 0)
    assert {span.name for span in spans.all} <= {"gradserve.v1.SocketService/IssueTicket"}


def test_health_checks_and_the_client_s_own_calls_have_no_spans_of_the_client(
    traced_server: LocalServer, spans: Spans
) -> None:
    with gradserve.connect(traced_server.address, tracing=spans.provider) as client:
        client.conditional_accumulator("float32", shape=())  # private: the client holds a lease in the background
    names = {span.name for span in spans.all if span.kind is SpanKind.CLIENT}
    assert "gradserve.v1.LeaseService/HoldClientLease" not in names


def test_the_trace_is_that_of_the_call_that_continues_it(traced_server: LocalServer, spans: Spans) -> None:
    """Calls of several threads do not mix up their traces."""
    tracer = trace.get_tracer("test", tracer_provider=spans.provider)
    with gradserve.connect(traced_server.address, tracing=spans.provider) as client:
        net = client.gradient_accumulator({"w": np.zeros(3, np.float32)}, shared_name="net")
        for step in range(3):
            with tracer.start_as_current_span(f"step {step}"):
                net.push_pull({"w": np.ones(3, np.float32)}, 1, step)
    pushes = spans.of(ACCUMULATORS + "PushPull", SpanKind.SERVER, number=3)
    steps = [spans.of(f"step {step}")[0] for step in range(3)]
    assert [context_of(span).trace_id for span in pushes] == [context_of(span).trace_id for span in steps]
