"""Counts and histories of a running server, and the log line that sums up each minute."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gradserve_protocol.extras import require
from gradserve_protocol.server_status import MemoryStatus
from gradserve_server.accumulators.gradient import Contribution
from gradserve_server.accumulators.rounds import AccumulatorObserver, Outcome
from gradserve_server.observe.calls import ROUND_SECONDS, STEPS, Calls, Histogram, WireTraffic
from gradserve_server.observe.rounds import Histories, History, RoundRecord
from gradserve_server.parameters.ledger import UpdateLedger
from gradserve_server.resources.registry import ResourceKey

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer, TracerProvider


class UpdateHistory(History):
    """The history of parameters, which it observes as an `AccumulatorObserver`. Gradients are updates.

    Attributes:
        reasons: The number of rounds that have ended since the server started, by the reason of their end.
        staleness: How many versions had been made since the one from which each update of the current round was
            computed.
        ledger: The ledger of the parameters, read-only.
    """

    __slots__ = ("_applying", "ledger", "reasons", "staleness")

    _LOG_LINE = (
        "parameters %s: %d updates led to step %d after %.6f s; the last one was from %r; ended by: %s; applied in "
        "%.6f s"
    )

    def __init__(self, key: ResourceKey, histories: Histories, applying: Histogram, ledger: UpdateLedger) -> None:
        """`applying` counts the times that optimizers took."""
        super().__init__(key, histories.totals, histories)
        self._applying = applying
        self.ledger = ledger
        self.reasons: Counter[str] = Counter()
        self.staleness: list[int] = []

    def on_answer(self, contribution: Contribution, outcome: Outcome, num_bytes: int) -> None:
        super().on_answer(contribution, outcome, num_bytes)
        if outcome is Outcome.ACCEPTED:
            staleness = self.ledger.rounds.global_step - contribution.local_step
            for _ in range(contribution.num_gradients):
                self._totals.staleness.observe(staleness)
                self.staleness.append(staleness)
            del self.staleness[len(self.times) - 1 : -1]  # of very many arrivals, only the latest is kept

    def on_drop(self) -> None:
        super().on_drop()
        self.staleness.clear()

    def _recorded(self, record: RoundRecord) -> RoundRecord:
        ended, seconds, staleness = self.ledger.ended, self.ledger.apply_seconds, tuple(self.staleness)
        assert ended is not None, "the round has ended"
        self.reasons[ended.reason] += 1
        self._applying.observe(seconds)
        self.staleness.clear()
        found = self.ledger.metrics
        return replace(record, reason=ended.reason, apply_seconds=seconds, staleness=staleness, metrics=found)


@dataclass(frozen=True)
class UpdateHistories:
    """The histories of all parameters. Used on the event loop only.

    Attributes:
        rounds: The histories, and the counts over all of them. Its staleness is that of all updates, also of those that
            count.
        applying: Seconds that the optimizer took in each round.
    """

    rounds: Histories = field(default_factory=Histories)
    applying: Histogram = field(default_factory=lambda: Histogram(ROUND_SECONDS))

    def __post_init__(self) -> None:
        self.rounds.totals.staleness = Histogram((0.0, *STEPS))  # most updates are not stale at all

    def begin(self, key: ResourceKey, ledger: UpdateLedger) -> UpdateHistory:
        """Returns a new history for parameters that have just been created."""
        return self.rounds.add(UpdateHistory(key, self.rounds, self.applying, ledger))

    def latest(self) -> Iterator[UpdateHistory]:
        """Returns the histories of parameters with updates, those whose round ended (or began, if first) last first."""
        for history in self.rounds.latest():
            assert isinstance(history, UpdateHistory)
            yield history

    def of(self, key: ResourceKey) -> UpdateHistory | None:
        """Returns the history of parameters, None if there are none of this name."""
        history = self.rounds.of(key)
        assert history is None or isinstance(history, UpdateHistory)
        return history


_log = logging.getLogger("gradserve_server.summary")
_TRACER_NAME = "gradserve_server"
EVERY_SECONDS = 60.0
_PARTS = (
    "last minute: %(calls)d calls, %(failed)d failed",
    "%(rounds)d rounds",
    "gradients: %(accepted)d accepted, %(stale)d stale, %(refused)d refused",
    "%(received_bytes)d bytes received, %(sent_bytes)d sent",
    "now %(in_progress)d calls under way, %(memory_bytes)d bytes of tensors",
)
_OF_PARAMETERS = (
    "parameters: %(parameter_rounds)d rounds, %(accepted_updates)d updates accepted, %(stale_updates)d stale, "
    "%(refused_updates)d refused"
)
_PARAMETER_FIELDS = ("parameter_rounds", "accepted_updates", "stale_updates", "refused_updates")


@dataclass(frozen=True)
class Observed:
    """Everything that is counted while the server runs.

    Attributes:
        calls: Counts and times of calls.
        histories: The rounds of accumulators.
        updates: The rounds of parameters.
        traffic: Bytes by transport.
        tracer: Makes spans; None without tracing.
    """

    calls: Calls = field(default_factory=Calls)
    histories: Histories = field(default_factory=Histories)
    updates: UpdateHistories = field(default_factory=UpdateHistories)
    traffic: WireTraffic = field(default_factory=WireTraffic)
    tracer: Tracer | None = None

    def observe(self, key: ResourceKey) -> AccumulatorObserver:
        """Returns the observer of an accumulator that has just been created."""
        return self._traced("accumulator", self.histories.begin(key))

    def observe_parameters(self, key: ResourceKey, ledger: UpdateLedger) -> AccumulatorObserver:
        """Returns the observer of parameters that have just been created."""
        history = self.updates.begin(key, ledger)
        return self._traced("parameters", history, lambda: {"gradserve.reason": history.rounds[-1].reason})

    def _traced(self, kind: str, history: History, more: Callable[[], Mapping[str, str]] = dict) -> AccumulatorObserver:
        if self.tracer is None:
            return history
        from gradserve_server.observe.tracing import TracedRounds  # not without OpenTelemetry

        return TracedRounds(kind, history.key, history, self.tracer, more)


def wanted_tracer(provider: TracerProvider | None, version: str, *, is_wanted: bool) -> Tracer | None:
    """Returns the tracer of a server; None without tracing.

    Args:
        provider: Makes the tracer; None for OpenTelemetry's global provider.
        version: The version of the server, which becomes an attribute of the spans.
        is_wanted: Whether to trace even if no provider was given.

    Raises:
        MissingExtraError: OpenTelemetry is not installed.
    """
    if provider is None and not is_wanted:
        return None
    require("tracing")
    from opentelemetry import trace

    return (provider or trace.get_tracer_provider()).get_tracer(_TRACER_NAME, version)


class Summary:
    """Logs a line every minute in which there were calls."""

    def __init__(self, observed: Observed, memory: Callable[[], Iterable[MemoryStatus]]) -> None:
        self._observed = observed
        self._memory = memory
        self._last = self._counts()

    async def run(self) -> None:
        """Logs until cancelled."""
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            self.log()

    def log(self) -> None:
        """Logs a summary since the last line; nothing if there were no calls."""
        last, now = self._last, self._counts()
        self._last = now
        if now["calls"] == last["calls"]:
            return
        fields = {name: count - last[name] for name, count in now.items()}
        fields["in_progress"] = sum(each.in_progress for each in self._observed.calls)
        fields["memory_bytes"] = next((each.num_bytes for each in self._memory()), 0)
        has_parameters = any(fields[name] for name in _PARAMETER_FIELDS)
        text = "; ".join((*_PARTS[:-2], *((_OF_PARAMETERS,) if has_parameters else ()), *_PARTS[-2:]))
        _log.info(text, fields, extra={"fields": fields})

    def _counts(self) -> dict[str, int]:
        """Returns counts since the server started."""
        observed, totals = self._observed, self._observed.histories.totals
        updates = observed.updates.rounds.totals
        calls = [each for each in observed.calls if not each.service.startswith("grpc.")]
        ways = observed.traffic.by_name().values()
        return {
            "calls": sum(each.started for each in calls),
            "failed": sum(count for each in calls for code, count in each.handled.items() if code != "OK"),
            "rounds": totals.rounds.count,
            "accepted": totals.accepted,
            "stale": totals.stale,
            "refused": totals.refused,
            "parameter_rounds": updates.rounds.count,
            "accepted_updates": updates.accepted,
            "stale_updates": updates.stale,
            "refused_updates": updates.refused,
            "received_bytes": sum(way.received for way in ways),
            "sent_bytes": sum(way.sent for way in ways),
        }
