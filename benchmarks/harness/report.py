"""Formats results as text."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.harness.comparison import ComparisonResult, Outcome, Verdict
from benchmarks.harness.memory import KEPT_AVERAGES, MemoryResult, MemoryUse
from benchmarks.harness.summary import Summary, paired_speed_ratios

_MB = 1e6


def render(result: ComparisonResult | MemoryResult) -> str:
    """Returns the table of one measurement, with its title."""
    match result:
        case ComparisonResult():
            return _render_comparison(result)
        case MemoryResult():
            return _render_memory(result)


def render_verdicts(verdicts: Iterable[Verdict]) -> str:
    """Returns one line for each target."""
    return "\n".join(["Targets", *(f"  {verdict}" for verdict in verdicts)])


def render_provenance(provenance: dict[str, Any]) -> str:
    """Returns one line for each fact about the machine and the code."""
    return "\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in provenance.items())


def _render_comparison(result: ComparisonResult) -> str:
    rows: list[tuple[str, ...]] = [
        ("", "ms", "middle half", "GB/s", "CPU ms", "wire MB", "gradserve's speed", "middle half")
    ]
    rows += [_comparison_row(result, outcome) for outcome in result.outcomes]
    notes = [f"  {outcome.label}: {outcome.failure}" for outcome in result.outcomes if outcome.failure]
    return "\n".join([result.comparison.title, *_align(rows), *notes])


def _comparison_row(result: ComparisonResult, outcome: Outcome) -> tuple[str, ...]:
    if outcome.failure or not outcome.seconds:
        return (outcome.label, "-", "", "", "", "", "", "")
    time = Summary.of([1e3 * seconds for seconds in outcome.seconds])
    rate = result.comparison.num_bytes / 1e9 / (time.median / 1e3)
    processor = f"{1e3 * statistics.mean(outcome.processor_seconds):.3g}"
    wire = f"{statistics.median(outcome.wire_bytes) / _MB:.3g}" if outcome.wire_bytes else ""
    speed = middle = ""
    own = result.outcomes[0]
    if outcome is not own and (ratio := result.speed_beside(outcome)) is not None:
        speed = f"{ratio:.2f}x"
        pairs = paired_speed_ratios(own.seconds, outcome.seconds)
        middle = f"{pairs.lower_quartile:.2f}-{pairs.upper_quartile:.2f}"
    spread = f"{time.lower_quartile:.3g}-{time.upper_quartile:.3g}"
    return (outcome.label, f"{time.median:.3g}", spread, f"{rate:.3g}", processor, wire, speed, middle)


def _render_memory(result: MemoryResult) -> str:
    header = ("workers", "idle MB", "peak MB", "after MB", "peak - idle, in gradients", "uploads", "kept", "rest")
    rows = [header, *(_memory_row(result, use) for use in result.uses)]
    notes = [f"  {result.failure}"] if result.failure else []
    size = result.measurement.num_bytes / _MB
    return "\n".join([f"{result.measurement.title}, gradients of {size:.0f} MB", *_align(rows), *notes])


def _memory_row(result: MemoryResult, use: MemoryUse) -> tuple[str, ...]:
    memory = [f"{num_bytes / _MB:.0f}" for num_bytes in (use.idle, use.peak, use.after)]
    peak, rest = result.peak_in_gradients(use), result.rest_in_gradients(use)
    return (str(use.num_workers), *memory, f"{peak:.1f}", str(use.num_workers), str(KEPT_AVERAGES), f"{rest:.1f}")


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
