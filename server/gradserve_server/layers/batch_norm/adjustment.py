"""Transforms of xhat before gamma and beta: the correction of renorm, then the adjustment."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.config import RandomAdjustment


def draw_adjustment(
    adjustment: RandomAdjustment, number: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns scale and bias of a draw, which depend only on the seed and the draw's number."""
    random = np.random.default_rng((adjustment.seed or 0, number))
    with np.errstate(over="ignore"):
        scale = random.uniform(*adjustment.scale, shape).astype(dtype)
        return scale, random.uniform(*adjustment.bias, shape).astype(dtype)


@dataclass(frozen=True)
class ChannelTransform:
    """The transform (xhat r + d) a + b of xhat, all U of shape [C].

    Followed by gamma and beta, it is FusedBatchNorm with the scale r a gamma and the offset (d a + b) gamma + beta.
    """

    r: Array
    d: Array
    a: Array
    b: Array

    def scale(self, gamma: Array) -> Array:
        """Returns the scale, including gamma."""
        return self.r * self.a * gamma

    def offset(self, gamma: Array, beta: Array) -> Array:
        """Returns the offset, including gamma and beta."""
        return (self.d * self.a + self.b) * gamma + beta

    def gamma_gradient(self, dots: Array, totals: Array) -> Array:
        """Returns sum dy ((xhat r + d) a + b), given the sums of dy xhat and of dy."""
        return self.a * self._corrected(dots, totals) + self.b * totals

    def scale_gradient(self, gamma: Array, dots: Array, totals: Array) -> Array:
        """Returns sum dy gamma (xhat r + d), the gradient with respect to a."""
        return gamma * self._corrected(dots, totals)

    def bias_gradient(self, gamma: Array, totals: Array) -> Array:
        """Returns sum dy gamma, the gradient with respect to b."""
        return gamma * totals

    def _corrected(self, dots: Array, totals: Array) -> Array:
        return self.r * dots + self.d * totals


def per_channel(array: Array, channels: int, axis_from_end: int) -> Array | None:
    """Returns an adjustment as one value for each channel, or None if it also varies along other axes.

    Args:
        array: The adjustment, in a shape that broadcasts to the inputs.
        channels: The number of channels.
        axis_from_end: The axis of the channels, as a negative number.
    """
    along = len(array.shape) + axis_from_end
    if any(size != 1 for axis, size in enumerate(array.shape) if axis != along):
        return None
    flat = array.reshape(-1)
    return flat if flat.shape == (channels,) else flat.repeat(channels)


def reduced_to(array: Array, shape: tuple[int, ...]) -> Array:
    """Returns an array summed to `shape`, over the axes along which `shape` broadcasts, in float64."""
    added = len(array.shape) - len(shape)
    axes = tuple(axis for axis in range(len(array.shape)) if axis < added or shape[axis - added] == 1)
    if not axes:
        return array.astype("float64")
    return array.sum(axis=axes, dtype="float64").reshape(shape)
