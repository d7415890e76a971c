"""How a client is told to make spans."""

import sys
from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry import trace

import gradserve
from gradserve.transport.settings import wanted_tracer
from gradserve_protocol.extras import MissingExtraError
from gradserve_server.observe.observed import wanted_tracer as wanted_server_tracer
from tests.tracing.spans import Spans


@pytest.mark.parametrize(
    ("tracing", "environment", "is_on"),
    [
        (None, {}, False),
        (False, {}, False),
        (True, {}, True),
        (None, {"GRADSERVE_TRACING": "on"}, True),
        (None, {"GRADSERVE_TRACING": "True"}, True),
        (None, {"GRADSERVE_TRACING": "1"}, True),
        (None, {"GRADSERVE_TRACING": ""}, False),
        (None, {"GRADSERVE_TRACING": "off"}, False),
        (False, {"GRADSERVE_TRACING": "on"}, False),
        (True, {"GRADSERVE_TRACING": "off"}, True),
    ],
)
def test_the_argument_goes_before_the_variable(
    tracing: bool | None, environment: Mapping[str, str], is_on: bool
) -> None:
    assert (wanted_tracer(tracing, environment) is not None) is is_on


def test_a_provider(spans: Spans) -> None:
    tracer = wanted_tracer(spans.provider, {})
    assert tracer is not None
    tracer.start_span("x").end()
    (span,) = spans.all
    assert span.instrumentation_scope is not None
    assert (span.instrumentation_scope.name, span.instrumentation_scope.version) == ("gradserve", gradserve.__version__)


@pytest.mark.parametrize("tracing", ["yes", 1, object(), trace.NoOpTracer()])
def test_anything_else_is_an_error(tracing: Any) -> None:
    with pytest.raises(
        gradserve.InvalidArgumentError, match="expected True, False or a TracerProvider of OpenTelemetry for tracing"
    ):
        gradserve.connect("localhost:1", tracing=tracing)


def test_a_variable_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVE_TRACING", "perhaps")
    with pytest.raises(gradserve.InvalidArgumentError, match="expected on or off for GRADSERVE_TRACING, got 'perhaps'"):
        gradserve.connect("localhost:1")


@pytest.mark.parametrize("source", ["tracing", "GRADSERVE_TRACING"])
def test_without_opentelemetry(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    argument = True if source == "tracing" else None
    with pytest.raises(gradserve.InvalidArgumentError, match=rf"{source}: .* pip install '\.\[tracing\]'"):
        wanted_tracer(argument, {"GRADSERVE_TRACING": "on"})


def test_a_server_without_opentelemetry_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(extra: str) -> None:
        raise MissingExtraError(extra)

    monkeypatch.setattr("gradserve_server.observe.observed.require", missing)
    with pytest.raises(MissingExtraError):
        wanted_server_tracer(None, "1", is_wanted=True)
    assert wanted_server_tracer(None, "1", is_wanted=False) is None
