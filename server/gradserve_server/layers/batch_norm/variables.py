"""The variables of a layer: their names, their initial values, and checks of new values."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError, NotFoundError
from gradserve_server.layers.batch_norm.config import BatchNormConfig, IgnoredArgument
from gradserve_server.limits import quoted


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


_SCALARS = ("moving_mean/local_step", "renorm_mean_weight", "renorm_stddev_weight")


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
    """Returns the entries of variables_collections that do not name a variable of the layer."""
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


def check_shared(layer: str, variables: Variables, channels: int, dtype: np.dtype[Any]) -> None:
    """Checks that inputs can share the existing variables.

    Args:
        layer: The name of the layer.
        variables: The existing variables.
        channels: The number of channels of the inputs.
        dtype: The dtype of variables for such inputs.

    Raises:
        InvalidArgumentError: The inputs need other variables.
    """
    shared = f"Trying to share variable {layer}/{next(iter(variables.by_name()))}, but specified"
    if variables.num_channels != channels:
        raise InvalidArgumentError(
            f"{shared} shape ({channels},) and found shape ({variables.num_channels},). "
            f"Expected {variables.num_channels} channels",
            field="inputs",
        )
    if variables.dtype != dtype:
        raise InvalidArgumentError(
            f"{shared} dtype {dtype} and found dtype {variables.dtype}. "
            f"Such inputs need variables of {dtype}, and the layer has {variables.dtype}",
            field="inputs",
        )


def check_name(layer: str, name: str, known: Collection[str], field: str) -> None:
    """Checks that a layer has a variable.

    Raises:
        NotFoundError: It has no variable of this name, or not yet.
    """
    if name not in known:
        has = f"it has {', '.join(known)}" if known else "its variables are created by the first forward"
        raise NotFoundError(f"layer {layer!r} has no variable {quoted(name)}; {has}", field=field)


def check_values(layer: str, variables: Variables | None, values: Mapping[str, Array]) -> None:
    """Checks that variables can be set to values, given by name.

    Raises:
        NotFoundError: The layer has no variable of this name, or not yet.
        InvalidArgumentError: A value has another dtype or shape than its variable.
    """
    found = {} if variables is None else variables.by_name()
    for index, (name, value) in enumerate(values.items()):
        check_name(layer, name, found, f"variables[{index}].name")
        expected = found[name]
        if value.dtype != expected.dtype or tuple(value.shape) != tuple(expected.shape):
            raise InvalidArgumentError(
                f"expected {expected.dtype} of shape {list(expected.shape)} for {name}, "
                f"got {value.dtype} of shape {list(value.shape)}",
                field=f"variables[{index}].tensor",
            )
