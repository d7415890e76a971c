"""The variables of a layer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.layers.batch_norm.config import BatchNormConfig, IgnoredArgument
from gradserve_server.layers.batch_norm.updates import UpdateOutputs

_SCALARS = ("local_step", "renorm_mean_weight", "renorm_stddev_weight")
_NAMES = {"biased": "moving_mean/biased", "local_step": "moving_mean/local_step"}
"""Where TensorFlow's name is not the field's."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Variables:
    """The values of one moment, None where the layer does not have the variable. Never written to.

    All are of one floating dtype; of shape [C], but `local_step` and the weights, which are scalars.

    Attributes:
        biased: With zero_debias_moving_mean; the moving mean before its correction.
        local_step: With zero_debias_moving_mean: the number of updates.
        moving_stddev: With renorm, but for its old form.
        renorm_mean: With renorm, and so renorm_stddev.
        renorm_mean_weight: In the old form of renorm, and so renorm_stddev_weight.
    """

    beta: Array | None = None
    gamma: Array | None = None
    moving_mean: Array
    moving_variance: Array
    biased: Array | None = None
    local_step: Array | None = None
    moving_stddev: Array | None = None
    renorm_mean: Array | None = None
    renorm_stddev: Array | None = None
    renorm_mean_weight: Array | None = None
    renorm_stddev_weight: Array | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of all variables."""
        dtype: np.dtype[Any] = self.moving_mean.dtype
        return dtype

    @property
    def num_channels(self) -> int:
        """C."""
        channels: int = self.moving_mean.shape[0]
        return channels

    @property
    def num_bytes(self) -> int:
        """The size of all of them."""
        return sum(int(array.nbytes) for array in self.by_name().values())

    def by_name(self) -> dict[str, Array]:
        """Returns those that there are by TensorFlow's names, relative to the scope."""
        return {public_name(name): array for name, array in self.by_field().items()}

    def by_field(self) -> dict[str, Array]:
        """Returns those that there are by the names of the fields."""
        arrays = {
            "beta": self.beta,
            "gamma": self.gamma,
            "moving_mean": self.moving_mean,
            "moving_variance": self.moving_variance,
            "biased": self.biased,
            "local_step": self.local_step,
            "moving_stddev": self.moving_stddev,
            "renorm_mean": self.renorm_mean,
            "renorm_stddev": self.renorm_stddev,
            "renorm_mean_weight": self.renorm_mean_weight,
            "renorm_stddev_weight": self.renorm_stddev_weight,
        }
        return {name: array for name, array in arrays.items() if array is not None}

    def with_values(self, values: Mapping[str, Array]) -> "Variables":
        """Returns them with other values, given by TensorFlow's names."""
        changes: Any = {name: values[public_name(name)] for name in self.by_field() if public_name(name) in values}
        return replace(self, **changes)

    def with_averages(self, averages: UpdateOutputs) -> "Variables":
        """Returns them with other moving averages."""
        return replace(
            self,
            moving_mean=averages.moving_mean,
            moving_variance=averages.moving_variance,
            biased=averages.biased,
            local_step=averages.local_step,
            moving_stddev=averages.moving_stddev,
            renorm_mean=averages.renorm_mean,
            renorm_stddev=averages.renorm_stddev,
            renorm_mean_weight=averages.renorm_mean_weight,
            renorm_stddev_weight=averages.renorm_stddev_weight,
        )


def public_name(field: str) -> str:
    """Returns TensorFlow's name of a variable, relative to the scope."""
    return _NAMES.get(field, field)


def variable_names(config: BatchNormConfig) -> list[str]:
    """Returns the names of the fields that a layer has."""
    names = ["moving_mean", "moving_variance"]
    names += [name for name in ("beta", "gamma") if config.has_variable(name)]
    if config.zero_debias_moving_mean:
        names += ["biased", "local_step"]
    if config.renorm:
        names += ["renorm_mean", "renorm_stddev"]
        names += ["renorm_mean_weight", "renorm_stddev_weight"] if config.renorm_zero_debias else ["moving_stddev"]
    return names


def unknown_variables(config: BatchNormConfig) -> list[IgnoredArgument]:
    """Returns the entries of variables_collections that are of no variable."""
    names = [public_name(name) for name in variable_names(config)]
    return [
        IgnoredArgument(f"variables_collections[{name}]", f"it is none of {', '.join(names)}")
        for name in config.variables_collections
        if name and name not in names
    ]


def initial_variables(config: BatchNormConfig, channels: int, dtype: np.dtype[Any]) -> Variables:
    """Returns the first values, in host memory.

    Raises:
        InvalidArgumentError: An initializer has another shape.
    """
    zeros, ones = np.zeros(channels), np.ones(channels)
    values: dict[str, NDArray[Any]] = {"beta": zeros, "gamma": ones, "moving_mean": zeros, "moving_variance": ones}
    for name in values:
        if name in config.param_initializers:
            values[name] = config.param_initializers[name].value(channels)
            (length,) = values[name].shape
            if length != channels:
                count = "Too many" if length > channels else "Too few"
                raise InvalidArgumentError(
                    f"{count} elements provided. Takes {channels}, as there are {channels} channels, but got {length}",
                    field=f"config.param_initializers[{name}]",
                )
    values |= {name: np.zeros(()) for name in _SCALARS} | {"biased": zeros}
    if config.renorm_zero_debias:
        values |= {"renorm_mean": zeros, "renorm_stddev": zeros}
    else:
        with np.errstate(invalid="ignore"):
            stddev = np.sqrt(values["moving_variance"])
        values |= {"moving_stddev": stddev, "renorm_mean": values["moving_mean"], "renorm_stddev": stddev}
    with np.errstate(over="ignore"):
        return Variables(**{name: values[name].astype(dtype) for name in variable_names(config)})


def variable_bytes(config: BatchNormConfig, channels: int, dtype: np.dtype[Any]) -> int:
    """Returns the size of all variables of a layer."""
    return sum((1 if name in _SCALARS else channels) * dtype.itemsize for name in variable_names(config))
