"""The moving averages of a layer."""

from collections.abc import Mapping
from dataclasses import dataclass

from gradserve_server.devices.device import Array


@dataclass(frozen=True, eq=False, kw_only=True)
class MovingAverages:
    """A snapshot of the moving averages, None for variables that the layer does not have. Never written to.

    All have the same floating dtype and shape [C], except `local_step` and the weights, which are scalars.

    Attributes:
        biased: The moving mean before its correction, with zero_debias_moving_mean.
        local_step: The number of updates, with zero_debias_moving_mean.
        moving_stddev: The moving standard deviation, with renorm except in its old form.
        renorm_mean: The average that renorm uses, with renorm; likewise renorm_stddev.
        renorm_mean_weight: The weight of renorm_mean, in the old form of renorm; likewise renorm_stddev_weight.
    """

    moving_mean: Array
    moving_variance: Array
    biased: Array | None = None
    local_step: Array | None = None
    moving_stddev: Array | None = None
    renorm_mean: Array | None = None
    renorm_stddev: Array | None = None
    renorm_mean_weight: Array | None = None
    renorm_stddev_weight: Array | None = None

    def by_name(self) -> dict[str, Array]:
        """Returns the averages that exist, by TensorFlow's names relative to the scope."""
        arrays = {
            "moving_mean": self.moving_mean,
            "moving_variance": self.moving_variance,
            "moving_mean/biased": self.biased,
            "moving_mean/local_step": self.local_step,
            "moving_stddev": self.moving_stddev,
            "renorm_mean": self.renorm_mean,
            "renorm_stddev": self.renorm_stddev,
            "renorm_mean_weight": self.renorm_mean_weight,
            "renorm_stddev_weight": self.renorm_stddev_weight,
        }
        return {name: array for name, array in arrays.items() if array is not None}


def averages_of(values: Mapping[str, Array]) -> MovingAverages:
    """Returns the averages among values that have TensorFlow's names; the reverse of `by_name`."""
    return MovingAverages(
        moving_mean=values["moving_mean"],
        moving_variance=values["moving_variance"],
        biased=values.get("moving_mean/biased"),
        local_step=values.get("moving_mean/local_step"),
        moving_stddev=values.get("moving_stddev"),
        renorm_mean=values.get("renorm_mean"),
        renorm_stddev=values.get("renorm_stddev"),
        renorm_mean_weight=values.get("renorm_mean_weight"),
        renorm_stddev_weight=values.get("renorm_stddev_weight"),
    )
