"""FusedBatchNorm as the layer uses it: for inputs of any rank, by the moments of the batch or by given ones."""

from dataclasses import dataclass

from gradserve_server.devices.device import Array
from gradserve_server.ops.batch_norm.spec import (
    BatchNorm,
    BatchNormRelu,
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
    """Calls the kernels for inputs of one geometry. All per-channel arrays are U of shape [C]."""

    batch_norm: BatchNorm
    geometry: Geometry
    epsilon: float

    @property
    def fuses_relu(self) -> bool:
        """True if the kernels can also compute a relu."""
        return isinstance(self.batch_norm, BatchNormRelu)

    def by_batch(self, x: Array, scale: Array, offset: Array, *, has_relu: bool = False) -> ForwardOutputs:
        """Normalises by the moments of x."""
        attributes = ForwardAttributes(epsilon=self.epsilon, is_training=True)
        # The kernels do not read mean and variance: any arrays will do.
        return self._forward(ForwardInputs(x, scale, offset, scale, scale), attributes, has_relu)

    def by_moments(
        self, x: Array, scale: Array, offset: Array, mean: Array, variance: Array, *, has_relu: bool = False
    ) -> Array:
        """Normalises by the given moments."""
        attributes = ForwardAttributes(epsilon=self.epsilon, is_training=False)
        return self._forward(ForwardInputs(x, scale, offset, mean, variance), attributes, has_relu).y

    def gradient(
        self,
        dy: Array,
        x: Array,
        scale: Array,
        mean: Array,
        variance: Array,
        *,
        through_moments: bool,
        relu_offset: Array | None = None,
    ) -> GradOutputs:
        """Returns the gradients of `by_batch` or `by_moments`.

        Args:
            dy: T, the gradient with respect to the result.
            x: T, as in the forward.
            scale: U, as in the forward.
            mean: U, as in the forward.
            variance: U, as in the forward.
            through_moments: Whether the moments were computed from x.
            relu_offset: The offset, if the forward had a relu.
        """
        attributes = GradAttributes(epsilon=self.epsilon, is_training=through_moments)
        inputs = GradInputs(dy, x, scale, mean, variance)
        if relu_offset is None:
            return self.batch_norm.gradient(inputs, attributes, self.geometry)
        assert isinstance(self.batch_norm, BatchNormRelu)
        return self.batch_norm.gradient_relu(inputs, relu_offset, attributes, self.geometry)

    def _forward(self, inputs: ForwardInputs, attributes: ForwardAttributes, has_relu: bool) -> ForwardOutputs:
        if not has_relu:
            return self.batch_norm.forward(inputs, attributes, self.geometry)
        assert isinstance(self.batch_norm, BatchNormRelu)
        return self.batch_norm.forward_relu(inputs, attributes, self.geometry)
