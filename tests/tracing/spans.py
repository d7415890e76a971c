"""The spans that tests look at."""

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind

from tests.servers.polling import eventually

ACCUMULATORS = "gradserve.v1.AccumulatorService/"
TENSORS = "gradserve.v1.TensorService/"
ROUND = "gradserve.round"
WAIT = "gradserve.wait"


class Spans:
    """Spans that have ended. A span of the server may end after the client has its answer.

    Attributes:
        provider: What makes the tracers whose spans these are.
    """

    def __init__(self, provider: TracerProvider, exporter: InMemorySpanExporter) -> None:
        self.provider = provider
        self._exporter = exporter

    @property
    def all(self) -> Sequence[ReadableSpan]:
        """All of them, in the order in which they ended."""
        return self._exporter.get_finished_spans()

    def of(self, name: str, kind: SpanKind = SpanKind.INTERNAL, *, number: int = 1) -> list[ReadableSpan]:
        """Returns the spans with a name, once there are so many of them."""
        return eventually(
            lambda: [span for span in self.all if span.name == name and span.kind is kind],
            lambda found: len(found) == number,
        )

    def call(self, name: str) -> tuple[ReadableSpan, ReadableSpan]:
        """Returns the spans of the client and of the server of the only call of a method."""
        (client,) = self.of(name, SpanKind.CLIENT)
        (server,) = self.of(name, SpanKind.SERVER)
        return client, server


def context_of(span: ReadableSpan) -> SpanContext:
    """Returns the context of a span, which has one."""
    context = span.get_span_context()
    assert context is not None
    return context


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    """Returns True if a span is a child of another one, in the same trace and within its time."""
    return (
        span.parent is not None
        and span.parent.span_id == context_of(parent).span_id
        and context_of(span).trace_id == context_of(parent).trace_id
    )


def linked(span: ReadableSpan) -> list[int]:
    """Returns the ids of the spans to which a span has links."""
    return [link.context.span_id for link in span.links]


def ids(spans: Sequence[ReadableSpan]) -> list[int]:
    """Returns the ids of spans."""
    return [context_of(span).span_id for span in spans]
