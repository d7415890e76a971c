"""Spans of what happens to an accumulator."""

from __future__ import annotations

import time
from collections import OrderedDict
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Self

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan

from gradserve_server.accumulators.observer import AccumulatorObserver, Wait
from gradserve_server.accumulators.rounds import Outcome
from gradserve_server.observe.call_record import current_span

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry.trace import Span, SpanContext, Tracer

    from gradserve_server.accumulators.gradient import Contribution
    from gradserve_server.accumulators.rounds import Round
    from gradserve_server.resources.registry import ResourceKey

ROUND = "gradserve.round"
WAIT = "gradserve.wait"

_MOST_LINKS = 128
"""As many as the SDK keeps of a span by default."""
_KEPT_ROUNDS = 16
"""Rounds may end faster than calls that waited for one are resumed."""


class TracedRounds:
    """An `AccumulatorObserver` that makes spans of waits and rounds, and passes everything on to another one.

    The span of a round begins with its first gradient. It is part of the trace of its first sampled gradient, and has
    links to the spans of the calls that brought its gradients. A wait is a child of the span of the call that waits,
    with a link to the round whose average it got. Used on the event loop only.
    """

    def __init__(self, key: ResourceKey, observer: AccumulatorObserver, tracer: Tracer) -> None:
        """Takes the key of the accumulator, the other observer, and what makes the spans."""
        self.tracer = tracer
        self.attributes = {"gradserve.accumulator": key.name}
        if key.container:
            self.attributes["gradserve.container"] = key.container
        self._observer = observer
        self._began = 0
        self._num_gradients = 0
        self._links: list[Link] = []
        self._ended: OrderedDict[int, SpanContext] = OrderedDict()

    def on_answer(self, contribution: Contribution, outcome: Outcome, num_bytes: int) -> None:
        """See `AccumulatorObserver`."""
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

    def on_round_end(self, ended: Round, num_required: int) -> None:
        """See `AccumulatorObserver`."""
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
            },
            links=links,
            start_time=self._began,
        )
        span.end()
        self._ended[ended.step] = span.get_span_context()
        if len(self._ended) > _KEPT_ROUNDS:
            self._ended.popitem(last=False)

    def waiting(self) -> AbstractContextManager[Wait]:
        """See `AccumulatorObserver`."""
        inner = self._observer.waiting()
        call = current_span()
        return inner if call is None or not call.is_recording() else _TracedWait(self, call, inner)

    def round_that_led_to(self, step: int) -> SpanContext | None:
        """Returns the context of a round's span; None if it has none, or has ended too long ago."""
        return self._ended.get(step)

    def on_repeat(self) -> None:
        """See `AccumulatorObserver`."""
        self._observer.on_repeat()

    def on_refusal(self) -> None:
        """See `AccumulatorObserver`."""
        self._observer.on_refusal()

    def on_close(self) -> None:
        """See `AccumulatorObserver`."""
        self._observer.on_close()


class _TracedWait(AbstractContextManager[Wait]):
    """A block in which a call waits, with a span."""

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
        """See `Wait`."""
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
