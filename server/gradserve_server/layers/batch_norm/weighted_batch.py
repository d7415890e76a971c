"""A batch with a weight for each item: its moments, and the gradients through them."""

from dataclasses import dataclass
from typing import Any

from gradserve_server.devices.device import Array
from gradserve_server.ops.batch_norm.spec import Geometry


@dataclass(frozen=True)
class WeightedBatch:
    """Inputs with a weight for each item: the moments of the batch, and the gradients through them.

    x is viewed as [N, outer, C, inner]; w are the weights. With W = outer inner sum(w), mu = sum(w x) / W and
    var = sum(w (x - mu)^2) / W; both are 0 where W is.

    Attributes:
        x: U, [N, outer, C, inner].
        weights: float64, [N].
        total: W, a float64 scalar.
    """

    x: Array
    weights: Array
    total: Array

    @classmethod
    def of(cls, x: Array, weights: Array, geometry: Geometry) -> "WeightedBatch":
        """Returns the batch of x, in the dtype of arithmetic and of any shape, and weights of any dtype."""
        num_items = x.shape[0]
        outer = geometry.outer // max(num_items, 1)
        wide = weights.astype("float64")
        viewed = x.reshape(num_items, outer, geometry.channels, geometry.inner)
        return cls(viewed, wide, wide.sum() * (outer * geometry.inner))

    def moments(self, xp: Any) -> tuple[Array, Array]:
        """Returns mean and variance, U of shape [C]."""
        mean = self._mean(xp, self.x)
        centered = self.x - mean[:, None]
        return mean, self._mean(xp, centered * centered)

    def inputs_gradient(self, xp: Any, through: "MomentsGradient") -> Array:
        """Returns the part of the inputs' gradient through the moments, [N, outer, C, inner].

        For each element of item i: -(w_i / W) / s (Sg + xhat Sgx).
        """
        scale = through.inverse_deviation * self._share(xp)
        slope, constant = ((scale * each).astype(self.x.dtype) for each in (through.dots, through.totals))
        result = self.x - through.mean[:, None]
        # One after the other: the product of both factors could leave the range of float32 where the result does not.
        result *= through.inverse_deviation.astype(self.x.dtype)[:, None]
        result *= slope[:, None]
        result += constant[:, None]
        result *= -self.weights.astype(self.x.dtype)[:, None, None, None]
        return result

    def weights_gradient(self, xp: Any, through: "MomentsGradient", variance: Array) -> Array:
        """Returns the gradient with respect to the weights, float64 of shape [N].

        For item i, summed over its elements: -(1 / W) sum(Sg xhat + Sgx / 2 (xhat^2 - var / s^2)).
        """
        inverse = through.inverse_deviation
        xhat = (self.x - through.mean[:, None]) * inverse.astype(self.x.dtype)[:, None]
        sums = xhat.sum(axis=(1, 3), dtype="float64")
        squares = (xhat * xhat).sum(axis=(1, 3), dtype="float64")
        count = self.x.shape[1] * self.x.shape[3]
        squares = squares - count * variance.astype("float64") * inverse**2
        return -self._share(xp) * (sums * through.totals + squares * through.dots / 2).sum(axis=1)

    def _mean(self, xp: Any, values: Array) -> Array:
        # Not a matrix product: a GPU's library for those is slow to start and takes much memory.
        sums = (self.weights[:, None] * values.sum(axis=(1, 3), dtype="float64")).sum(axis=0)
        return (sums * self._share(xp)).astype(values.dtype)

    def _share(self, xp: Any) -> Array:
        """Returns 1 / W, or 0 if W is 0."""
        is_zero = self.total == 0
        return xp.where(is_zero, 0.0, 1.0 / xp.where(is_zero, 1.0, self.total))


@dataclass(frozen=True)
class MomentsGradient:
    """The terms of the gradient through the moments, each of shape [C]; g is the gradient with respect to xhat.

    Attributes:
        mean: U.
        inverse_deviation: float64: 1 / s.
        totals: float64: Sg, the sums of g.
        dots: float64: Sgx, the sums of g xhat.
    """

    mean: Array
    inverse_deviation: Array
    totals: Array
    dots: Array
