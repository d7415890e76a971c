"""A traced server, clients of it, and the spans of both."""

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gradserve_server.config import ServerConfig
from gradserve_server.parts import Parts
from gradserve_testing import LocalServer
from tests.servers.runtime import NOT_WARMED_UP
from tests.tracing.spans import Spans


@pytest.fixture
def spans() -> Spans:
    """The spans that have ended, of clients and of the server."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Spans(provider, exporter)


@pytest.fixture
def traced_server(spans: Spans) -> Iterator[LocalServer]:
    """A server whose calls have spans."""
    with LocalServer(ServerConfig(runtime=NOT_WARMED_UP), Parts(tracer_provider=spans.provider)) as local:
        yield local
