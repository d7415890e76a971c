"""The moving averages of a layer."""

from collections.abc import Mapping
from dataclasses import dataclass

from gradserve_server.devices.device import Array


@dataclass(frozen=True, eq=False, kw_only=True)
class MovingAverages:
    """The values of one moment, None where the layer does not have the variable. Never written to.

    All are of one floating dtype; of shape [C], but `local_step` and the weights, which are scalars.

    Attributes:
        biased: With zero_debias_moving_mean; the moving mean before its correction.
        local_step: With zero_debias_moving_mean: the number of updates.
        moving_stddev: With renorm, but for its old form.
        renorm_mean: With renorm, and so renorm_stddev.
        renorm_mean_weight: In the old form of renorm, and so renorm_stddev_weight.
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
        """Returns those that there are by TensorFlow's names, relative to the scope."""
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
