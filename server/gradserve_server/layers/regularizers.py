"""The regularizers of tf.contrib.layers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradserve_server.devices.device import Array
from gradserve_server.errors import InvalidArgumentError

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
