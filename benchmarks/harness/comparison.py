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
from benchmarks.harness.effort import Effort
from benchmarks.harness.environments import NotAvailableError
from benchmarks.harness.processes import ProcessError
from benchmarks.harness.summary import Summary, paired_speed_ratios, speed_ratio
from benchmarks.harness.verdicts import BytesVerdict, SpeedVerdict, Target

_PAUSE_SECONDS = 0.05
"""The pause between contestants, in which one finishes its deferred work before the next starts."""


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
    fewer_bytes: tuple[Target, ...] = ()
    """Targets for the bytes over links to servers: at least so many times fewer than the peer's."""
    num_own: int = 1
    """The first so many contestants are gradserve's: the report gives the speed of each beside all others."""
    warm_up_steps: int = 3

    def run(self, effort: Effort, progress: Callable[[str], None]) -> ComparisonResult:
        """Runs the repetitions; a contestant that fails is left out, and the result says why."""
        outcomes = [Outcome(each.label) for each in self.contestants]
        with contextlib.ExitStack() as stack:
            entries = []
            for contestant, outcome in zip(self.contestants, outcomes, strict=True):
                progress(f"{self.title}: starting {contestant.label}")
                with outcome.record_failure():
                    running = stack.enter_context(contestant.running(progress))
                    outcome.versions = running.versions
                    _warm_up(running, self.warm_up_steps)
                    entries.append((outcome, running))
            for repetition in effort.repetitions():
                progress(f"{self.title}: repetition {repetition + 1} of {effort.repeats}")
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
    link_bytes: list[float] = field(default_factory=list)
    """The bytes over links to servers per step, one entry per repetition."""
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
        sent_before = loopback.sent_bytes(running.devices)
        bytes_before, processor_before = loopback.received_bytes(), running.processor_seconds()
        times = []
        for _ in range(steps):
            times.append(running.step())
            running.settle()
        bytes_after, processor_after = loopback.received_bytes(), running.processor_seconds()
        self.seconds.append(statistics.median(times))
        self.processor_seconds.append((processor_after - processor_before) / steps)
        if running.devices:
            self.link_bytes.append((loopback.sent_bytes(running.devices) - sent_before) / steps)
        if bytes_before is not None and bytes_after is not None:
            self.wire_bytes.append((bytes_after - bytes_before) / steps)


@dataclass(frozen=True)
class ComparisonResult:
    """All outcomes of a comparison, gradserve's first."""

    comparison: Comparison
    outcomes: list[Outcome]

    @property
    def own(self) -> list[Outcome]:
        """The outcomes of gradserve whose speed is given."""
        return self.outcomes[: self.comparison.num_own]

    def speed_beside(self, own: Outcome, peer: Outcome) -> float | None:
        """Returns the speed of one divided by the peer's; None unless both were measured to the end."""
        if own.failure or peer.failure or not own.seconds or not peer.seconds:
            return None
        return speed_ratio(own.seconds, peer.seconds)

    def verdicts(self) -> list[SpeedVerdict | BytesVerdict]:
        """Returns a verdict for each target."""
        return [
            *(self._judge(target) for target in self.comparison.targets),
            *(self._judge_bytes(target) for target in self.comparison.fewer_bytes),
        ]

    def to_json(self) -> dict[str, Any]:
        """Returns the result for the result file; times are in seconds."""
        return {
            "title": self.comparison.title,
            "num_bytes": self.comparison.num_bytes,
            "steps_per_repetition": self.comparison.steps,
            "contestants": [self._outcome_to_json(outcome) for outcome in self.outcomes],
            "targets": [verdict.to_json() for verdict in self.verdicts()],
        }

    def _judge(self, target: Target) -> SpeedVerdict:
        by_label = {outcome.label: outcome for outcome in self.outcomes}
        own = self.outcomes[0] if target.own is None else by_label[target.own]
        speeds = [self.speed_beside(own, by_label[label]) for label in target.labels]
        slowest = min((speed for speed in speeds if speed is not None), default=None)
        return SpeedVerdict(self.comparison.title, own.label, target.peer, target.speed, slowest)

    def _judge_bytes(self, target: Target) -> BytesVerdict:
        by_label = {outcome.label: outcome for outcome in self.outcomes}
        own, peer = by_label[target.own or self.outcomes[0].label], by_label[target.peer]
        ratio = None
        if own.link_bytes and peer.link_bytes:
            ratio = statistics.median(peer.link_bytes) / statistics.median(own.link_bytes)
        return BytesVerdict(self.comparison.title, own.label, target.peer, target.speed, ratio)

    def _outcome_to_json(self, outcome: Outcome) -> dict[str, Any]:
        fields: dict[str, Any] = {"label": outcome.label, "versions": outcome.versions}
        if outcome.failure:
            return {**fields, "failure": outcome.failure}
        fields |= {"seconds": vars(Summary.of(outcome.seconds)), "repetitions": outcome.seconds}
        fields["processor_seconds"] = statistics.mean(outcome.processor_seconds)
        if outcome.wire_bytes:
            fields["wire_bytes"] = statistics.median(outcome.wire_bytes)
        if outcome.link_bytes:
            fields["bytes_into_servers"] = statistics.median(outcome.link_bytes)
        fields["gradserve_speeds"] = {
            own.label: {"ratio": ratio, "paired": vars(paired_speed_ratios(own.seconds, outcome.seconds))}
            for own in self.own
            if own is not outcome and (ratio := self.speed_beside(own, outcome)) is not None
        }
        return fields


def _warm_up(running: RunningContestant, steps: int) -> None:
    """The first steps open connections and fault in memory; each result is checked."""
    for _ in range(steps):
        running.step()
        running.check()
        running.settle()
