"""The variables of a layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.layers.batch_norm.averages import MovingAverages, averages_of
from gradserve_server.layers.batch_norm.config import BatchNormConfig, IgnoredArgument

_SCALARS = ("moving_mean/local_step", "renorm_mean_weight", "renorm_stddev_weight")


@dataclass(frozen=True, eq=False, kw_only=True)
class Variables:
    """A snapshot of the variables, None for those that the layer does not have. Never written to.

    All have the same floating dtype; beta and gamma have shape [C].
    """

    beta: Array | None = None
    gamma: Array | None = None
    averages: MovingAverages

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of all variables."""
        dtype: np.dtype[Any] = self.averages.moving_mean.dtype
        return dtype

    @property
    def num_channels(self) -> int:
        """The number of channels, C."""
        channels: int = self.averages.moving_mean.shape[0]
        return channels

    @property
    def num_bytes(self) -> int:
        """The size of all variables in bytes."""
        return sum(int(array.nbytes) for array in self.by_name().values())

    def by_name(self) -> dict[str, Array]:
        """Returns the variables that exist, by TensorFlow's names relative to the scope."""
        found = {"beta": self.beta, "gamma": self.gamma}
        return {name: array for name, array in found.items() if array is not None} | self.averages.by_name()

    def with_values(self, values: Mapping[str, Array]) -> "Variables":
        """Returns the variables with new values for some, given by TensorFlow's names."""
        return variables_of(self.by_name() | dict(values))


def variables_of(values: Mapping[str, Array]) -> Variables:
    """Returns the variables with these values; the reverse of `by_name`."""
    return Variables(beta=values.get("beta"), gamma=values.get("gamma"), averages=averages_of(values))


def variable_names(config: BatchNormConfig) -> list[str]:
    """Returns TensorFlow's names of the variables that a layer has, relative to the scope."""
    names = ["moving_mean", "moving_variance"]
    names += [name for name in ("beta", "gamma") if config.has_variable(name)]
    if config.zero_debias_moving_mean:
        names += ["moving_mean/biased", "moving_mean/local_step"]
    if config.renorm:
        names += ["renorm_mean", "renorm_stddev"]
        names += ["renorm_mean_weight", "renorm_stddev_weight"] if config.renorm_zero_debias else ["moving_stddev"]
    return names


def unknown_variables(config: BatchNormConfig) -> list[IgnoredArgument]:
    """Returns the entries of variables_collections that name no variable."""
    names = variable_names(config)
    return [
        IgnoredArgument(f"variables_collections[{name}]", f"it is none of {', '.join(names)}")
        for name in config.variables_collections
        if name and name not in names
    ]


def initial_variables(config: BatchNormConfig, channels: int, dtype: np.dtype[Any]) -> Variables:
    """Returns the initial values, in host memory.

    Raises:
        InvalidArgumentError: An initializer has the wrong shape.
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
    values |= {name: np.zeros(()) for name in _SCALARS} | {"moving_mean/biased": zeros}
    if config.renorm_zero_debias:
        values |= {"renorm_mean": zeros, "renorm_stddev": zeros}
    else:
        with np.errstate(invalid="ignore"):
            stddev = np.sqrt(values["moving_variance"])
        values |= {"moving_stddev": stddev, "renorm_mean": values["moving_mean"], "renorm_stddev": stddev}
    with np.errstate(over="ignore"):
        return variables_of({name: values[name].astype(dtype) for name in variable_names(config)})


def variable_bytes(config: BatchNormConfig, channels: int, dtype: np.dtype[Any]) -> int:
    """Returns the size of all variables of a layer in bytes."""
    return sum((1 if name in _SCALARS else channels) * dtype.itemsize for name in variable_names(config))
