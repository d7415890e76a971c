"""Runs gradserve and its peers in alternation and compares the medians."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import loopback
from benchmarks.harness.contestants import Contestant, RunningContestant
from benchmarks.harness.environments import NotAvailableError
from benchmarks.harness.processes import ProcessError
from benchmarks.harness.summary import Summary, paired_speed_ratios, speed_ratio

_WARM_UP_STEPS = 3
_PAUSE_SECONDS = 0.05
"""The pause between contestants, in which one finishes its deferred work before the next starts."""


@dataclass(frozen=True)
class Target:
    """A target: at least this many times as fast as a peer."""

    peer: str
    """The peer's name in the report."""
    labels: tuple[str, ...]
    """The peer's contestants; the fastest of them counts."""
    speed: float


@dataclass(frozen=True)
class Comparison:
    """The same unit of work done by several contestants, gradserve first."""

    title: str
    contestants: tuple[Contestant, ...]
    num_bytes: int
    """The payload from which throughput is computed: one array, or one worker's gradients."""
    steps: int
    """The steps in a repetition, whose time is the median of theirs."""
    targets: tuple[Target, ...] = ()

    def run(self, repeats: int, progress: Callable[[str], None]) -> ComparisonResult:
        """Runs all repetitions; a contestant that fails is left out, and the result says why."""
        outcomes = [Outcome(each.label) for each in self.contestants]
        with contextlib.ExitStack() as stack:
            entries = []
            for contestant, outcome in zip(self.contestants, outcomes, strict=True):
                progress(f"{self.title}: starting {contestant.label}")
                with outcome.record_failure():
                    running = stack.enter_context(contestant.running(progress))
                    outcome.versions = running.versions
                    _warm_up(running)
                    entries.append((outcome, running))
            for repetition in range(repeats):
                progress(f"{self.title}: repetition {repetition + 1} of {repeats}")
                # In alternating order, so that no contestant always runs after the same one.
                for outcome, running in entries if repetition % 2 == 0 else reversed(entries):
                    if outcome.failure is None:
                        time.sleep(_PAUSE_SECONDS)
                        with outcome.record_failure():
                            outcome.measure(running, self.steps)
        return ComparisonResult(self, outcomes)


@dataclass
class Outcome:
    """The measurements of one contestant."""

    label: str
    seconds: list[float] = field(default_factory=list)
    """The time of a step, one entry per repetition."""
    processor_seconds: list[float] = field(default_factory=list)
    """The processor time of all processes per step, one entry per repetition."""
    wire_bytes: list[float] = field(default_factory=list)
    """The bytes over loopback per step, one entry per repetition."""
    versions: dict[str, str] = field(default_factory=dict)
    failure: str | None = None

    @contextlib.contextmanager
    def record_failure(self) -> Iterator[None]:
        """Turns a contestant's error into the `failure` of its outcome."""
        try:
            yield
        except NotAvailableError as error:
            self.failure = f"not available: {error}"
        except ProcessError as error:
            self.failure = f"failed: {error}"

    def measure(self, running: RunningContestant, steps: int) -> None:
        """Runs one repetition, after a step that does not count."""
        running.step()
        running.settle()
        bytes_before, processor_before = loopback.received_bytes(), running.processor_seconds()
        times = []
        for _ in range(steps):
            times.append(running.step())
            running.settle()
        bytes_after, processor_after = loopback.received_bytes(), running.processor_seconds()
        self.seconds.append(statistics.median(times))
        self.processor_seconds.append((processor_after - processor_before) / steps)
        if bytes_before is not None and bytes_after is not None:
            self.wire_bytes.append((bytes_after - bytes_before) / steps)


@dataclass(frozen=True)
class ComparisonResult:
    """All outcomes of a comparison, gradserve's first."""

    comparison: Comparison
    outcomes: list[Outcome]

    def speed_beside(self, peer: Outcome) -> float | None:
        """Returns gradserve's speed divided by the peer's; None unless both were measured to the end."""
        own = self.outcomes[0]
        if own.failure or peer.failure:
            return None
        return speed_ratio(own.seconds, peer.seconds)

    def verdicts(self) -> list[Verdict]:
        """Returns a verdict for each target."""
        return [self._judge(target) for target in self.comparison.targets]

    def to_json(self) -> dict[str, Any]:
        """Returns the result for the result file; times are in seconds."""
        return {
            "title": self.comparison.title,
            "num_bytes": self.comparison.num_bytes,
            "steps_per_repetition": self.comparison.steps,
            "contestants": [self._outcome_to_json(outcome) for outcome in self.outcomes],
            "targets": [vars(verdict) for verdict in self.verdicts()],
        }

    def _judge(self, target: Target) -> Verdict:
        peers = [outcome for outcome in self.outcomes[1:] if outcome.label in target.labels]
        speeds = [speed for peer in peers if (speed := self.speed_beside(peer)) is not None]
        return Verdict(self.comparison.title, target.peer, target.speed, min(speeds, default=None))

    def _outcome_to_json(self, outcome: Outcome) -> dict[str, Any]:
        fields: dict[str, Any] = {"label": outcome.label, "versions": outcome.versions}
        if outcome.failure:
            return {**fields, "failure": outcome.failure}
        fields |= {"seconds": vars(Summary.of(outcome.seconds)), "repetitions": outcome.seconds}
        fields["processor_seconds"] = statistics.mean(outcome.processor_seconds)
        if outcome.wire_bytes:
            fields["wire_bytes"] = statistics.median(outcome.wire_bytes)
        own = self.outcomes[0]
        if outcome is not own and not own.failure:
            fields["gradserve_speed_ratio"] = self.speed_beside(outcome)
            fields["paired_speed_ratios"] = vars(paired_speed_ratios(own.seconds, outcome.seconds))
        return fields


@dataclass(frozen=True)
class Verdict:
    """A target, and the measured speed."""

    title: str
    peer: str
    target: float
    measured: float | None
    """None if gradserve or the peer could not be measured."""

    def __str__(self) -> str:
        if self.measured is None:
            return f"not measured: {self.title}, {self.peer}: target >= {self.target:.2f}x"
        word = "reached" if self.measured >= self.target else "MISSED"
        speed = f"{self.measured:.2f}x the speed of {self.peer}"
        return f"{word}: {self.title}: {speed}, target >= {self.target:.2f}x"


def _warm_up(running: RunningContestant) -> None:
    """The first steps open connections and fault in memory; each result is checked."""
    for _ in range(_WARM_UP_STEPS):
        running.step()
        running.check()
        running.settle()
