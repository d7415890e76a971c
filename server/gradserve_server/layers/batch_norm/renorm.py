"""The correction of Batch Renormalization: how far a batch is from the averages.

Ioffe, "Batch Renormalization: Towards Reducing Minibatch Dependence in Batch-Normalized Models", 2017.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradserve_server.devices.device import Array


@dataclass(frozen=True)
class RenormAverages:
    """The averages before the update, each of shape [C] except the weights, which are scalars.

    Attributes:
        weights: How far mean and stddev have come from zero, in the old form of renorm.
    """

    mean: Array
    stddev: Array
    weights: tuple[Array, Array] | None = None


def correction(
    xp: Any,
    averages: RenormAverages,
    mean: Array,
    variance: Array,
    epsilon: float,
    clipping: Mapping[str, float],
) -> tuple[Array, Array]:
    """Returns r and d of a batch with these moments; gradients do not flow through them.

    With s = sqrt(variance + epsilon), m and R the averages of mean and standard deviation:

        r = s / R, from rmin to rmax;  d = (mean - m) / R, from -dmax to dmax

    where R is at least sqrt(epsilon). In the old form, averages that started at zero are completed by the batch:
    m = renorm_mean + (1 - renorm_mean_weight) mean, and R likewise.
    """
    stddev = xp.sqrt(variance + epsilon)
    if averages.weights is None:
        center, spread = averages.mean, xp.maximum(averages.stddev, epsilon**0.5 if epsilon > 0 else 0)
    else:
        mean_weight, stddev_weight = averages.weights
        center = averages.mean + (1 - mean_weight) * mean
        spread = averages.stddev + (1 - stddev_weight) * stddev
    r, d = stddev / spread, (mean - center) / spread
    if "rmin" in clipping:
        r = xp.maximum(r, clipping["rmin"])
    if "rmax" in clipping:
        r = xp.minimum(r, clipping["rmax"])
    if "dmax" in clipping:
        d = xp.minimum(xp.maximum(d, -clipping["dmax"]), clipping["dmax"])
    return r, d
