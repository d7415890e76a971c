"""The context of a trace in the metadata of calls: W3C Trace Context."""

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gradserve.wire.frames import Metadata

_PROPAGATOR = TraceContextTextMapPropagator()


def metadata_of(span: trace.Span) -> Metadata:
    """Returns the metadata with which a call continues the trace of a span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
    return tuple(carrier.items())


def context_in(metadata: Mapping[str, str]) -> Context:
    """Returns the context that the metadata of a call continues; an empty one if they name none that is valid."""
    return _PROPAGATOR.extract(metadata, Context())
