"""Spans of rounds and waits, and the links between them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from opentelemetry.trace import SpanKind

import gradserve
from gradserve.transport.settings import TransportName
from gradserve_testing import LocalServer
from tests.servers.polling import eventually
from tests.tracing.spans import ACCUMULATORS, ROUND, WAIT, Spans, context_of, ids, is_child, linked

ONES = {"w": np.ones(3, np.float32)}


def _wait_for(number: int, server: LocalServer) -> None:
    """Waits until so many calls wait."""
    eventually(lambda: server.inspect(lambda inner: inner.usage.waiters.used), lambda seen: seen == number)


@pytest.mark.parametrize("way", ["grpc", "bulk", "shared_memory"])
def test_a_round_has_links_to_the_applies_in_it(traced_server: LocalServer, spans: Spans, way: TransportName) -> None:
    with gradserve.connect(traced_server.address, transport=way, tracing=spans.provider) as client:
        net = client.gradient_accumulator(ONES, shared_name="net")
        for worker in ("a", "b"):
            net.apply_grad(ONES, 0, worker_id=worker)
        net.take_grad(2)
        net.apply_grad(ONES, 0, worker_id="late")
    applies = spans.of(ACCUMULATORS + "ApplyGradient", SpanKind.SERVER, number=3)
    assert [(each.attributes or {})["gradserve.outcome"] for each in applies] == ["ACCEPTED", "ACCEPTED", "STALE"]
    (ended,) = spans.of(ROUND)
    assert linked(ended) == ids(applies[:2])
    assert [dict(link.attributes or {}) for link in ended.links] == [
        {"gradserve.worker_id": worker, "gradserve.local_step": 0} for worker in ("a", "b")
    ]
    assert dict(ended.attributes or {}) == {
        "gradserve.accumulator": "net",
        "gradserve.container": "default",
        "gradserve.step": 1,
        "gradserve.num_required": 2,
        "gradserve.num_gradients": 2,
    }
    assert is_child(ended, applies[0])


def test_a_wait_has_a_link_to_the_round_that_ended_it(traced_server: LocalServer, spans: Spans) -> None:
    with (
        gradserve.connect(traced_server.address, tracing=spans.provider) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        net = client.gradient_accumulator(ONES, shared_name="net")
        taken = threads.submit(net.take_grad, 2)
        read = threads.submit(net.read_average, 1)
        _wait_for(2, traced_server)
        net.apply_grad(ONES, 0, worker_id="a")
        net.push_pull(ONES, 2, 0, worker_id="b")
        taken.result()
        read.result()
    (ended,) = spans.of(ROUND)
    waits = spans.of(WAIT, number=2)
    assert [linked(wait) for wait in waits] == [ids([ended])] * 2
    assert [(wait.attributes or {})["gradserve.step"] for wait in waits] == [1, 1]
    calls = [spans.of(ACCUMULATORS + method, SpanKind.SERVER)[0] for method in ("TakeGradient", "ReadAverage")]
    assert {wait.parent.span_id for wait in waits if wait.parent} == set(ids(calls))


def test_each_wait_has_a_link_to_the_round_whose_average_it_got(traced_server: LocalServer, spans: Spans) -> None:
    """Two rounds end in one turn of the server's event loop, before any of those who waited is resumed."""
    with (
        gradserve.connect(traced_server.address, tracing=spans.provider) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        net = client.gradient_accumulator(ONES, shared_name="net")
        reads = [threads.submit(net.read_average, step) for step in (1, 2)]
        _wait_for(2, traced_server)
        for step in (0, 1):
            net.push_pull(ONES, 1, step)
        for read in reads:
            read.result()
    rounds = {(span.attributes or {})["gradserve.step"]: context_of(span).span_id for span in spans.of(ROUND, number=2)}
    for wait in spans.of(WAIT, number=2):
        assert linked(wait) == [rounds[(wait.attributes or {})["gradserve.step"]]]


def test_rounds_of_workers_without_traces(traced_server: LocalServer, spans: Spans) -> None:
    """The spans of their calls begin traces of their own."""
    with gradserve.connect(traced_server.address) as client:
        net = client.gradient_accumulator(ONES, shared_name="net")
        net.push_pull(ONES, 1, 0)
    (pushed,) = spans.of(ACCUMULATORS + "PushPull", SpanKind.SERVER)
    (ended,) = spans.of(ROUND)
    assert is_child(ended, pushed)


def test_many_gradients(traced_server: LocalServer, spans: Spans) -> None:
    with gradserve.connect(traced_server.address, tracing=spans.provider) as client:
        net = client.gradient_accumulator(ONES, shared_name="net")
        for _ in range(130):
            net.apply_grad(ONES, 0)
        net.take_grad(130)
    (ended,) = spans.of(ROUND)
    assert (ended.attributes or {})["gradserve.num_gradients"] == 130
    assert len(ended.links) == 128


def test_a_round_of_parameters_has_its_reason_and_links_to_the_pushes_in_it(
    traced_server: LocalServer, spans: Spans
) -> None:
    with (
        gradserve.connect(traced_server.address, tracing=spans.provider) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        found = client.parameters(ONES, shared_name="llm", num_required=2)
        waiting = threads.submit(found.push_pull, ONES, 0, worker_id="a")
        eventually(lambda: found.info().num_updates, lambda seen: seen == 1)
        found.push(ONES, 0, worker_id="b")
        waiting.result()
    (ended,) = spans.of(ROUND)
    assert dict(ended.attributes or {}) == {
        "gradserve.parameters": "llm",
        "gradserve.container": "default",
        "gradserve.step": 1,
        "gradserve.num_required": 2,
        "gradserve.num_gradients": 2,
        "gradserve.reason": "required",
    }
    assert [dict(link.attributes or {})["gradserve.worker_id"] for link in ended.links] == ["a", "b"]
    (wait,) = spans.of(WAIT)
    assert linked(wait) == ids([ended])
    assert (wait.attributes or {})["gradserve.parameters"] == "llm"
