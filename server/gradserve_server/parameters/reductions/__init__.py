"""The ways in which the updates of a round become one.

`spec` has the reductions as values. The others work on the updates that are held for a round, in three steps, of which
servers of sharded parameters do the first and the last for their own pieces:

1. `choices` measures squared norms and distances, which `exact` adds up;
2. it decides by the sums over all servers which update counts how much;
3. `reduce` makes the components as was decided. `reduce_updates` does all of it.

The same updates in the same order give the same bits on any number of threads and servers, wherever these divide
components: arrays are only added, subtracted, multiplied, divided and sorted, element by element, and what is added up
over elements is added up exactly.
"""

from gradserve_server.parameters.reductions.reduce import (
    Elsewhere,
    Report,
    UpdateReport,
    clip_scale,
    measured_distances,
    measured_norm,
    reduce_as_decided,
    reduce_updates,
)
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
    "Elsewhere",
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
    "clip_scale",
    "measured_distances",
    "measured_norm",
    "reduce_as_decided",
    "reduce_updates",
    "reduction_of",
    "reduction_record",
]
