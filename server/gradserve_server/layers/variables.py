"""Initial values and regularizers of variables, by the names of TensorFlow's."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError

Draw = Callable[[np.random.Generator, int, Mapping[str, float]], NDArray[np.float64]]

_GLOROT_TRUNCATION = 0.87962566103423978
"""The standard deviation of a standard normal distribution truncated at two standard deviations."""


@dataclass(frozen=True)
class NamedInitializer:
    """One of TensorFlow's initializers, with its parameters.

    Attributes:
        name: One of `INITIALIZERS`.
        parameters: The parameters that were given, by name.
        seed: The seed of a random initializer.
    """

    name: str
    parameters: Mapping[str, float]
    seed: int | None = None

    num_bytes = 0

    def check(self, field: str) -> None:
        """Checks name and parameters.

        Raises:
            InvalidArgumentError: One of them is unknown or invalid.
        """
        field = f"{field}.named"
        known = INITIALIZERS.get(self.name)
        if known is None:
            raise InvalidArgumentError(
                f"expected an initializer out of {', '.join(INITIALIZERS)}, got {self.name!r}", field=f"{field}.name"
            )
        for name, value in self.parameters.items():
            if name not in known.defaults:
                takes = ", ".join(known.defaults) or "no parameters"
                raise InvalidArgumentError(
                    f"{self.name} has no parameter {name}; it takes {takes}", field=f"{field}.{name}"
                )
            if not math.isfinite(value):
                raise InvalidArgumentError(f"expected a finite {name}, got {value}", field=f"{field}.{name}")
        if self.seed is not None and not known.is_random:
            raise InvalidArgumentError(f"{self.name} is not random and takes no seed", field=f"{field}.seed")
        self._check_spread({**known.defaults, **self.parameters}, field)

    @property
    def is_random(self) -> bool:
        """True if the initializer needs a seed."""
        return INITIALIZERS[self.name].is_random

    def value(self, channels: int) -> NDArray[np.float64]:
        """Returns the initial value of a variable of shape [channels]."""
        known = INITIALIZERS[self.name]
        with np.errstate(over="ignore"):
            return known.draw(np.random.default_rng(self.seed), channels, {**known.defaults, **self.parameters})

    def _check_spread(self, parameters: Mapping[str, float], field: str) -> None:
        if "stddev" in parameters and parameters["stddev"] < 0:
            raise InvalidArgumentError(
                f"expected a stddev of at least 0, got {parameters['stddev']:g}", field=f"{field}.stddev"
            )
        if "minval" in parameters and parameters["minval"] > parameters["maxval"]:
            raise InvalidArgumentError(
                f"expected minval <= maxval, got {parameters['minval']:g} and {parameters['maxval']:g}",
                field=f"{field}.minval",
            )
        if "minval" in parameters and not math.isfinite(parameters["maxval"] - parameters["minval"]):
            raise InvalidArgumentError(
                "expected a finite difference of minval and maxval, "
                f"got {parameters['minval']:g} and {parameters['maxval']:g}",
                field=f"{field}.minval",
            )


@dataclass(frozen=True, eq=False)
class TensorInitializer:
    """An initial value given as a tensor.

    Attributes:
        tensor: The value in host memory, of any dtype that converts to the variable's.
    """

    tensor: NDArray[Any]

    is_random = False

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TensorInitializer)
            and self.tensor.shape == other.tensor.shape
            and np.array_equal(self.tensor, other.tensor, equal_nan=True)
        )

    @property
    def num_bytes(self) -> int:
        """The size of the value in bytes."""
        return self.tensor.nbytes

    def __hash__(self) -> int:
        return hash(self.tensor.tobytes())

    def __repr__(self) -> str:
        return f"a tensor of shape {list(self.tensor.shape)}"

    def check(self, field: str) -> None:
        """Checks that the tensor can initialize a variable of shape [C].

        Raises:
            InvalidArgumentError: It cannot.
        """
        if self.tensor.dtype.kind not in "fiuV" or self.tensor.ndim > 1:
            raise InvalidArgumentError(
                f"expected real numbers of shape [C] or [], got {self.tensor.dtype} of shape {list(self.tensor.shape)}",
                field=f"{field}.tensor",
            )

    def value(self, channels: int) -> NDArray[np.float64]:
        """Returns the value, with a scalar repeated for all channels."""
        wide = self.tensor.astype(np.float64)
        return np.full(channels, wide) if wide.ndim == 0 else wide


Initializer = NamedInitializer | TensorInitializer


@dataclass(frozen=True)
class _Known:
    """An initializer: `draw` takes a generator, the number of channels and a value for each of `defaults`."""

    draw: Draw
    defaults: dict[str, float]
    is_random: bool = True


def _truncated_normal(random: np.random.Generator, channels: int) -> NDArray[np.float64]:
    """Draws from a standard normal distribution, again for values more than two standard deviations away."""
    drawn = random.standard_normal(channels)
    while True:
        outside = np.abs(drawn) > 2
        count = int(np.count_nonzero(outside))
        if count == 0:
            return drawn
        drawn[outside] = random.standard_normal(count)


def _glorot(random: np.random.Generator, channels: int, _: Mapping[str, float]) -> NDArray[np.float64]:
    """Draws as in Glorot and Bengio, 2010; TensorFlow takes the length of a vector for both fans."""
    limit = math.sqrt(3 / max(channels, 1))
    return random.uniform(-limit, limit, channels)


def _glorot_normal(random: np.random.Generator, channels: int, _: Mapping[str, float]) -> NDArray[np.float64]:
    return _truncated_normal(random, channels) * (math.sqrt(1 / max(channels, 1)) / _GLOROT_TRUNCATION)


INITIALIZERS: Mapping[str, _Known] = {
    "zeros": _Known(lambda _, channels, p: np.zeros(channels), {}, is_random=False),
    "ones": _Known(lambda _, channels, p: np.ones(channels), {}, is_random=False),
    "constant": _Known(lambda _, channels, p: np.full(channels, p["value"]), {"value": 0.0}, is_random=False),
    "uniform": _Known(
        lambda random, channels, p: random.uniform(p["minval"], p["maxval"], channels), {"minval": 0.0, "maxval": 1.0}
    ),
    "normal": _Known(
        lambda random, channels, p: random.normal(p["mean"], p["stddev"], channels), {"mean": 0.0, "stddev": 1.0}
    ),
    "truncated_normal": _Known(
        lambda random, channels, p: p["mean"] + p["stddev"] * _truncated_normal(random, channels),
        {"mean": 0.0, "stddev": 1.0},
    ),
    "glorot": _Known(_glorot, {}),
    "glorot_normal": _Known(_glorot_normal, {}),
}
"""The initializers, by name."""


REGULARIZERS: Mapping[str, tuple[str, ...]] = {"l1": ("l1",), "l2": ("l2",), "l1_l2": ("l1", "l2")}
"""The scales that each regularizer takes, by name."""


@dataclass(frozen=True)
class Regularizer:
    """A regularizer, whose loss is l1 sum |v| + l2 sum v^2 / 2.

    Attributes:
        name: One of `REGULARIZERS`.
        scales: The scales that were given, by name. For l1_l2 the default of each is 1.
    """

    name: str
    scales: Mapping[str, float]

    def check(self, field: str) -> None:
        """Checks name and scales.

        Raises:
            InvalidArgumentError: One of them is unknown, missing or invalid.
        """
        takes = REGULARIZERS.get(self.name)
        if takes is None:
            raise InvalidArgumentError(
                f"expected a regularizer out of {', '.join(REGULARIZERS)}, got {self.name!r}", field=f"{field}.name"
            )
        for name, scale in self.scales.items():
            if name not in takes:
                raise InvalidArgumentError(
                    f"{self.name} has no scale {name}; it takes {', '.join(takes)}", field=f"{field}.{name}"
                )
            if not (scale >= 0 and math.isfinite(scale)):
                raise InvalidArgumentError(
                    f"Setting a scale less than 0 on a regularizer: {scale:g}; expected a finite {name} of at least 0",
                    field=f"{field}.{name}",
                )
        if self.name != "l1_l2" and self.name not in self.scales:
            raise InvalidArgumentError(
                f"expected a scale {self.name} for the regularizer {self.name}, got none", field=field
            )

    @property
    def l1(self) -> float:
        """The factor of the sum of absolute values."""
        return self._scale("l1")

    @property
    def l2(self) -> float:
        """The factor of half the sum of squares."""
        return self._scale("l2")

    def loss(self, xp: Any, variable: Array) -> Array:
        """Returns the loss, a float64 scalar; `xp` is NumPy or CuPy."""
        values = variable.astype("float64")
        return self.l1 * xp.abs(values).sum() + self.l2 / 2 * xp.square(values).sum()

    def gradient(self, xp: Any, variable: Array) -> Array:
        """Returns the gradient of the loss, in the dtype of the variable; the gradient of |v| at 0 is 0."""
        values = variable.astype("float64")
        return (self.l1 * xp.sign(values) + self.l2 * values).astype(variable.dtype)

    def _scale(self, name: str) -> float:
        if name not in REGULARIZERS[self.name]:
            return 0.0
        return self.scales.get(name, 1.0)
