"""Medians, quartiles, and ratios of medians."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """The median of a sample, and its quartiles."""

    median: float
    lower_quartile: float
    upper_quartile: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Summarizes one value or more."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper)


def speed_ratio(seconds: Sequence[float], peer_seconds: Sequence[float]) -> float:
    """Returns the ratio of the medians: the speed as a multiple of the peer's. 2 means half the time."""
    return statistics.median(peer_seconds) / statistics.median(seconds)


def paired_speed_ratios(seconds: Sequence[float], peer_seconds: Sequence[float]) -> Summary:
    """Returns the ratio for each repetition, whose two halves ran one right after the other."""
    return Summary.of([peer / own for own, peer in zip(seconds, peer_seconds, strict=True)])
