"""The ways in which the updates of a round become one.

`spec` has the reductions as values. The others work on the updates that are held for a round, in three steps that
servers of sharded parameters can do apart:

1. `measures` computes numbers of one component: squared norms, distances and products, in float64 and fixed blocks;
2. `choices` decides by the totals of these numbers which update counts how much;
3. `reduce` makes the components as was decided. `reduce_updates` does all of it on one server.

The same updates in the same order give the same bits on any number of threads, and on any number of servers that have
whole components: arrays are only added, subtracted, multiplied, divided and sorted, element by element, and numbers of
blocks and components are added in their order.
"""

from gradserve_server.parameters.reductions.reduce import Report, UpdateReport, clipped_factor, reduce_updates
from gradserve_server.parameters.reductions.spec import (
    GeometricMedian,
    Krum,
    Maximum,
    Mean,
    Median,
    Reduction,
    Sum,
    TrimmedMean,
    reduction_of,
    reduction_record,
)

__all__ = [
    "GeometricMedian",
    "Krum",
    "Maximum",
    "Mean",
    "Median",
    "Reduction",
    "Report",
    "Sum",
    "TrimmedMean",
    "UpdateReport",
    "clipped_factor",
    "reduce_updates",
    "reduction_of",
    "reduction_record",
]
