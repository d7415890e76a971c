"""FusedBatchNorm as the layer uses it: for inputs of any rank, by the moments of the batch or by others."""

from dataclasses import dataclass

from gradserve_server.devices.device import Array
from gradserve_server.ops.batch_norm.batch_norm import BatchNorm
from gradserve_server.ops.batch_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    Geometry,
    GradAttributes,
    GradInputs,
    GradOutputs,
)


@dataclass(frozen=True)
class Normalization:
    """Calls the kernels for inputs of one geometry. All that has one value for each channel is U, of shape [C]."""

    batch_norm: BatchNorm
    geometry: Geometry
    epsilon: float

    def by_batch(self, x: Array, scale: Array, offset: Array) -> ForwardOutputs:
        """Normalises by the moments of x."""
        attributes = ForwardAttributes(epsilon=self.epsilon, is_training=True)
        # Mean and variance are not read: any arrays will do.
        return self.batch_norm.forward(ForwardInputs(x, scale, offset, scale, scale), attributes, self.geometry)

    def by_moments(self, x: Array, scale: Array, offset: Array, mean: Array, variance: Array) -> Array:
        """Normalises by moments that are given."""
        attributes = ForwardAttributes(epsilon=self.epsilon, is_training=False)
        return self.batch_norm.forward(ForwardInputs(x, scale, offset, mean, variance), attributes, self.geometry).y

    def gradient(
        self, dy: Array, x: Array, scale: Array, mean: Array, variance: Array, *, through_moments: bool
    ) -> GradOutputs:
        """Returns the gradients of either; `through_moments` where x decided the moments."""
        attributes = GradAttributes(epsilon=self.epsilon, is_training=through_moments)
        return self.batch_norm.gradient(GradInputs(dy, x, scale, mean, variance), attributes, self.geometry)
