"""The latency of small calls while the same server is busy with large ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.contestants import Contestant
from benchmarks.harness.effort import Effort
from benchmarks.harness.environments import NotAvailableError
from benchmarks.harness.processes import ProcessError
from benchmarks.harness.verdicts import LimitVerdict


@dataclass(frozen=True)
class LatencyMeasurement:
    """Several ways of being busy, one after the other.

    Each worker reports the `seconds` of its small calls and the `num_bytes` of its large ones in a step.
    """

    title: str
    contestants: tuple[Contestant, ...]
    p99_limit: float
    """The limit for the 99th percentile, in seconds."""

    def run(self, effort: Effort, progress: Callable[[str], None]) -> LatencyResult:
        """Measures every contestant; one that fails is left out, and the result says why."""
        return LatencyResult(self, [self._measure(each, effort, progress) for each in self.contestants])

    def _measure(self, contestant: Contestant, effort: Effort, progress: Callable[[str], None]) -> LatencyOutcome:
        outcome = LatencyOutcome(contestant.label)
        try:
            with contestant.running(progress) as running:
                running.step()  # opens connections and faults in memory
                running.check()
                for repetition in effort.repetitions():
                    progress(f"{self.title}: {contestant.label}: repetition {repetition + 1} of {effort.repeats}")
                    seconds = running.step()
                    running.check()
                    reports = running.report()
                    outcome.seconds += [each for report in reports for each in report["seconds"]]
                    outcome.bytes_per_second.append(sum(report["num_bytes"] for report in reports) / seconds)
        except (NotAvailableError, ProcessError) as error:
            outcome.failure = str(error)
        return outcome


@dataclass
class LatencyOutcome:
    """The latencies beside one contestant."""

    label: str
    seconds: list[float] = field(default_factory=list)
    """The time of every small call, of all repetitions."""
    bytes_per_second: list[float] = field(default_factory=list)
    """The throughput of the large calls, one entry per repetition."""
    failure: str | None = None

    @property
    def median(self) -> float:
        """The median latency, in seconds."""
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        """The latency that one call in a hundred exceeds, in seconds."""
        return sorted(self.seconds)[math.ceil(0.99 * len(self.seconds)) - 1]


@dataclass(frozen=True)
class LatencyResult:
    """The latencies beside all contestants."""

    measurement: LatencyMeasurement
    outcomes: list[LatencyOutcome]

    def verdicts(self) -> list[LimitVerdict]:
        """Returns a verdict for each contestant."""
        limit = 1e3 * self.measurement.p99_limit
        return [
            LimitVerdict(
                self.measurement.title,
                outcome.label,
                "ms (p99)",
                limit,
                1e3 * outcome.p99 if outcome.seconds and not outcome.failure else None,
            )
            for outcome in self.outcomes
        ]

    def to_json(self) -> dict[str, Any]:
        """Returns the result for the result file; times are in seconds."""
        return {
            "title": self.measurement.title,
            "outcomes": [self._outcome_to_json(outcome) for outcome in self.outcomes],
            "targets": [verdict.to_json() for verdict in self.verdicts()],
        }

    def _outcome_to_json(self, outcome: LatencyOutcome) -> dict[str, Any]:
        if not outcome.seconds:
            return {"label": outcome.label, "failure": outcome.failure}
        summary = {"median": outcome.median, "p99": outcome.p99, "longest": max(outcome.seconds)}
        return {**vars(outcome), **summary}
