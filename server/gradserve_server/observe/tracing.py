"""OpenTelemetry traces: spans of an accumulator's rounds and waits, and their export. docs/tracing.md describes them.

Calls have spans too, which `rpc.boundary` makes. Importing this module needs the extra `tracing`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan

from gradserve_server.accumulators.rounds import AccumulatorObserver, Outcome, Wait
from gradserve_server.observe.calls import current_span

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry.trace import Span, SpanContext, Tracer

    from gradserve_server.accumulators.gradient import Contribution
    from gradserve_server.accumulators.rounds import Comparison, Round, SeenRound
    from gradserve_server.errors import ServiceError
    from gradserve_server.resources.registry import ResourceKey

ROUND = "gradserve.round"
WAIT = "gradserve.wait"
_MOST_LINKS = 128
"""The number of links that the SDK keeps for each span by default."""
_KEPT_ROUNDS = 16
"""Several rounds may end before a call that waited for the first of them is resumed."""
_EXPORTERS = ("otlp", "console")
_EXPORTER = "OTEL_TRACES_EXPORTER"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HTTP = "http/protobuf"
_LAST_SECONDS = 3.0
"""The longest time that a stopping server waits for the collector."""
_log = logging.getLogger(__name__)


class TracedRounds:
    """An `AccumulatorObserver` that makes spans of waits and rounds, then notifies another observer.

    The span of a round begins with its first gradient. It joins the trace of its first sampled gradient and links to
    the spans of the calls that sent its gradients. The span of a wait is a child of the waiting call's span and links
    to the round whose average the call received. Used on the event loop only.
    """

    def __init__(
        self,
        kind: str,
        key: ResourceKey,
        observer: AccumulatorObserver,
        tracer: Tracer,
        more: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`kind` is "accumulator" or "parameters". `more` returns more attributes of the round that has just ended."""
        self.tracer = tracer
        self._more = more
        self.attributes = {f"gradserve.{kind}": key.name}
        if key.container:
            self.attributes["gradserve.container"] = key.container
        self._observer = observer
        self._began = 0
        self._num_gradients = 0
        self._links: list[Link] = []
        self._ended: OrderedDict[int, SpanContext] = OrderedDict()

    def on_answer(self, contribution: Contribution, outcome: Outcome, num_bytes: int) -> None:
        self._observer.on_answer(contribution, outcome, num_bytes)
        if outcome is Outcome.ACCEPTED:
            if not self._num_gradients:
                self._began = time.time_ns()
            self._num_gradients += 1
        span = current_span()
        if span is None:
            return
        if span.is_recording():
            span.set_attribute("gradserve.outcome", outcome.value)
        context = span.get_span_context()
        if outcome is Outcome.ACCEPTED and context.trace_flags.sampled and len(self._links) < _MOST_LINKS:
            sender = {"gradserve.worker_id": contribution.worker_id} if contribution.worker_id else {}
            self._links.append(Link(context, {"gradserve.local_step": contribution.local_step, **sender}))

    def about_to_end(self, step: int, num_required: int) -> SeenRound | None:
        return self._observer.about_to_end(step, num_required)

    def on_restore(self, seen: Sequence[SeenRound]) -> None:
        self._observer.on_restore(seen)

    def on_comparison(self, comparison: Comparison) -> None:
        self._observer.on_comparison(comparison)

    def on_round_end(self, ended: Round, num_required: int) -> None:
        self._observer.on_round_end(ended, num_required)
        links, num_gradients = self._links, self._num_gradients
        self._links, self._num_gradients = [], 0
        if not links:
            return
        assert ended.step is not None, "the round has ended"
        span = self.tracer.start_span(
            ROUND,
            trace.set_span_in_context(NonRecordingSpan(links[0].context), Context()),
            attributes={
                **self.attributes,
                "gradserve.step": ended.step,
                "gradserve.num_required": num_required,
                "gradserve.num_gradients": num_gradients,
                **self._more(),
            },
            links=links,
            start_time=self._began,
        )
        span.end()
        self._ended[ended.step] = span.get_span_context()
        if len(self._ended) > _KEPT_ROUNDS:
            self._ended.popitem(last=False)

    def waiting(self) -> AbstractContextManager[Wait]:
        inner = self._observer.waiting()
        call = current_span()
        return inner if call is None or not call.is_recording() else _TracedWait(self, call, inner)

    def round_that_led_to(self, step: int) -> SpanContext | None:
        """Returns the span context of the round that ended with this step; None if it has no span or is forgotten."""
        return self._ended.get(step)

    def on_repeat(self) -> None:
        self._observer.on_repeat()

    def on_refusal(self, error: ServiceError) -> None:
        self._observer.on_refusal(error)

    def on_drop(self) -> None:
        self._observer.on_drop()
        self._links, self._num_gradients = [], 0

    def on_close(self) -> None:
        self._observer.on_close()


class _TracedWait(AbstractContextManager[Wait]):
    """The span of a block in which a call waits."""

    def __init__(self, rounds: TracedRounds, call: Span, inner: AbstractContextManager[Wait]) -> None:
        self._rounds = rounds
        self._inner = inner
        self._span = rounds.tracer.start_span(
            WAIT, trace.set_span_in_context(call, Context()), attributes=rounds.attributes
        )

    def __enter__(self) -> Self:
        self._wait = self._inner.__enter__()
        return self

    def served(self, step: int) -> None:
        self._wait.served(step)
        self._span.set_attribute("gradserve.step", step)
        context = self._rounds.round_that_led_to(step)
        if context is not None:
            self._span.add_link(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._span.set_attribute("error.type", kind.__qualname__)
        self._span.end()
        self._inner.__exit__(kind, error, traceback)


class ExporterError(ValueError):
    """An environment variable names an unknown exporter or protocol."""


class ExportedTraces(AbstractContextManager[None]):
    """Exports the spans of OpenTelemetry's global provider during a block, and flushes the rest at its end.

    OTEL_TRACES_EXPORTER is "otlp" (OTLP over HTTP, the default) or "console" (standard output). The SDK reads the other
    variables: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and so on.
    """

    def __init__(self, version: str, environment: Mapping[str, str] = os.environ) -> None:
        """Takes the server's version, which becomes an attribute of the spans, and the environment variables.

        Raises:
            ExporterError: There is no such exporter or protocol.
        """
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

        name = environment.get(_EXPORTER) or "otlp"
        if name not in _EXPORTERS:
            raise ExporterError(f"{_EXPORTER}: expected {' or '.join(_EXPORTERS)}, got {name!r}")
        for variable in _PROTOCOLS:
            protocol = environment.get(variable) or _HTTP
            if protocol != _HTTP:
                raise ExporterError(f"{variable}: expected {_HTTP}, got {protocol!r}")
        named = {} if environment.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "gradserve"}
        resource = Resource.create({**named, SERVICE_VERSION: version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter: SpanExporter = ConsoleSpanExporter() if name == "console" else OTLPSpanExporter()
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))

    def __enter__(self) -> None:
        trace.set_tracer_provider(self._provider)

    def __exit__(self, *_: object) -> None:
        # In a thread, because shutting down retries failed exports for ten seconds.
        ending = threading.Thread(target=self._provider.shutdown, name="gradserve-last-spans", daemon=True)
        ending.start()
        ending.join(_LAST_SECONDS)
        if ending.is_alive():
            _log.warning("the last spans are lost: the collector has not taken them within %g s", _LAST_SECONDS)
            self._exporter.shutdown()
