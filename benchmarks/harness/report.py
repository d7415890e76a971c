"""Formats results as text."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.harness.comparison import ComparisonResult, Outcome
from benchmarks.harness.latency import LatencyResult
from benchmarks.harness.memory import MemoryResult, MemoryUse
from benchmarks.harness.summary import Summary, paired_speed_ratios
from benchmarks.harness.verdicts import Verdict

_MB = 1e6


def render(result: ComparisonResult | LatencyResult | MemoryResult) -> str:
    """Returns the table of one measurement, with its title."""
    match result:
        case ComparisonResult():
            return _render_comparison(result)
        case LatencyResult():
            return _render_latency(result)
        case MemoryResult():
            return _render_memory(result)


def render_verdicts(verdicts: Iterable[Verdict]) -> str:
    """Returns one line for each target."""
    return "\n".join(["Targets", *(f"  {verdict}" for verdict in verdicts)])


def render_provenance(provenance: dict[str, Any]) -> str:
    """Returns one line for each fact about the machine and the code."""
    return "\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in provenance.items())


def _render_comparison(result: ComparisonResult) -> str:
    speeds = [f"{letter}'s speed" if letter else "gradserve's speed" for letter in _letters(result)]
    rows: list[tuple[str, ...]] = [("", "ms", "middle half", "GB/s", "CPU ms", "wire MB", *speeds)]
    rows += [_comparison_row(result, outcome) for outcome in result.outcomes]
    notes = [
        f"  {outcome.label}: {statistics.median(outcome.link_bytes) / _MB:.4g} MB into the servers"
        for outcome in result.outcomes
        if outcome.link_bytes
    ]
    notes += [f"  {outcome.label}: {outcome.failure}" for outcome in result.outcomes if outcome.failure]
    return "\n".join([result.comparison.title, *_align(rows), *notes])


def _letters(result: ComparisonResult) -> list[str]:
    """Returns a letter for each contestant of gradserve, by which the columns name it; an only one needs none."""
    return [chr(ord("A") + i) for i in range(len(result.own))] if len(result.own) > 1 else [""]


def _comparison_row(result: ComparisonResult, outcome: Outcome) -> tuple[str, ...]:
    label = outcome.label
    if len(result.own) > 1:
        letters = dict(zip((own.label for own in result.own), _letters(result), strict=True))
        label = f"{letters.get(label, ' ')}  {label}"
    if outcome.failure or not outcome.seconds:
        return (label, "-", *[""] * (4 + len(result.own)))
    time = Summary.of([1e3 * seconds for seconds in outcome.seconds])
    rate = result.comparison.num_bytes / 1e9 / (time.median / 1e3)
    processor = f"{1e3 * statistics.mean(outcome.processor_seconds):.3g}"
    wire = f"{statistics.median(outcome.wire_bytes) / _MB:.3g}" if outcome.wire_bytes else ""
    spread = f"{time.lower_quartile:.3g}-{time.upper_quartile:.3g}"
    speeds = [_speed(result, own, outcome) for own in result.own]
    return (label, f"{time.median:.3g}", spread, f"{rate:.3g}", processor, wire, *speeds)


def _speed(result: ComparisonResult, own: Outcome, peer: Outcome) -> str:
    """Returns gradserve's speed beside a peer with the middle half of the repetitions, as in "2.00x (1.90-2.10)"."""
    ratio = result.speed_beside(own, peer)
    if own is peer or ratio is None:
        return ""
    pairs = paired_speed_ratios(own.seconds, peer.seconds)
    return f"{ratio:.2f}x ({pairs.lower_quartile:.2f}-{pairs.upper_quartile:.2f})"


def _render_memory(result: MemoryResult) -> str:
    header = ("workers", "idle MB", "peak MB", "after MB", "peak - idle, MB", "in gradients", "peak resident MB")
    rows = [header, *(_memory_row(result, use) for use in result.uses)]
    notes = [f"  {result.failure}"] if result.failure else []
    measurement = result.measurement
    size = f"gradients of {measurement.num_bytes / _MB:.0f} MB"
    title = f"{measurement.title}, {size}: {measurement.contestants[0].label}"
    return "\n".join([title, *_align(rows), *notes])


def _memory_row(result: MemoryResult, use: MemoryUse) -> tuple[str, ...]:
    added = use.peak - use.idle
    sizes = (use.idle, use.peak, use.after, added)
    gradients = f"{added / result.measurement.num_bytes:.1f}"
    megabytes = [f"{num_bytes / _MB:.0f}" for num_bytes in sizes]
    return (str(use.num_workers), *megabytes, gradients, f"{use.peak_resident / _MB:.0f}")


def _render_latency(result: LatencyResult) -> str:
    rows: list[tuple[str, ...]] = [("", "checks", "median ms", "p99 ms", "longest ms", "gradients, GB/s")]
    for outcome in result.outcomes:
        values: tuple[str, ...] = ("", "", "", "", "")
        if outcome.seconds:
            times = [1e3 * seconds for seconds in (outcome.median, outcome.p99, max(outcome.seconds))]
            rate = statistics.median(outcome.bytes_per_second) / 1e9
            values = (str(len(outcome.seconds)), *(f"{each:.3g}" for each in times), f"{rate:.3g}")
        rows.append((outcome.label, *values))
    notes = [f"  {outcome.label}: {outcome.failure}" for outcome in result.outcomes if outcome.failure]
    return "\n".join([result.measurement.title, *_align(rows), *notes])


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows with columns as wide as their widest entry: the first left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
