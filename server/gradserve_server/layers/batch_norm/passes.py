"""The arithmetic of a forward and of a backward, except for the activation.

Kernels of FusedBatchNorm do the large part; the rest is arithmetic on per-channel values, or, with weights and with an
adjustment that varies within a channel, on whole arrays. The correction of renorm is that of Ioffe, "Batch
Renormalization: Towards Reducing Minibatch Dependence in Batch-Normalized Models", 2017.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.spec import (
    BackwardAttributes,
    BackwardInputs,
    BackwardOutputs,
    BackwardPlan,
    ForwardAttributes,
    ForwardInputs,
    ForwardPlan,
    channel_axis,
)
from gradserve_server.layers.batch_norm.weighted_batch import MomentsGradient, WeightedBatch
from gradserve_server.ops.batch_norm import spec as fused
from gradserve_server.ops.batch_norm.spec import BatchNorm
from gradserve_server.tensors.spec import FLOATING, widened


@dataclass(frozen=True)
class Normalized:
    """The result of a forward before its activation; see `ForwardOutputs`.

    Attributes:
        y: T, the normalized inputs.
        is_activated: Whether y includes the activation, a relu, already.
        batch: Mean and variance for the update of the moving averages, in training.
    """

    y: Array
    is_activated: bool
    mean: Array
    variance: Array
    batch: tuple[Array, Array] | None = None
    r: Array | None = None
    d: Array | None = None


class ForwardPass:
    """Computes one forward."""

    def __init__(
        self, xp: Any, batch_norm: BatchNorm, inputs: ForwardInputs, attributes: ForwardAttributes, plan: ForwardPlan
    ) -> None:
        """Takes `xp`, NumPy or CuPy, the kernels, and the checked call."""
        config = attributes.config
        self._xp = xp
        self._inputs = inputs
        self._attributes = attributes
        self._plan = plan
        self._channels = Channels.of(xp, inputs.inputs, config.data_format)
        self._normalization = Normalization(batch_norm, plan.geometry, config.epsilon)
        self._has_relu = config.activation_fn == "relu" and batch_norm.fuses_relu
        self._gamma, self._beta = self._channels.scales(inputs.gamma), self._channels.offsets(inputs.beta)

    def normalized(self) -> Normalized:
        """Returns the normalized inputs, and the moments used."""
        plan = self._plan
        if not self._attributes.is_training or plan.geometry.count == 0:
            return self._by_moving_averages()
        if plan.uses_weights or plan.uses_adjustment or self._attributes.config.renorm:
            return self._transformed()
        return self._by_own_moments()

    def _by_moving_averages(self) -> Normalized:
        mean = self._channels.offsets(self._inputs.moving_mean)
        variance = self._channels.scales(self._inputs.moving_variance)
        return Normalized(self._affine(self._gamma, self._beta, mean, variance), self._has_relu, mean, variance)

    def _by_own_moments(self) -> Normalized:
        whole = self._normalization.by_batch(self._inputs.inputs, self._gamma, self._beta, has_relu=self._has_relu)
        mean, variance = whole.reserve_space_1, whole.reserve_space_2
        fed = whole.batch_variance if self._plan.implementation.is_fused else variance
        return Normalized(whole.y, self._has_relu, mean, variance, (mean, fed))

    def _transformed(self) -> Normalized:
        """Normalises with renorm, an adjustment or weights, where the moments are computed first."""
        inputs, plan, r, d = self._inputs, self._plan, None, None
        mean, variance = self._moments()
        if self._attributes.config.renorm:
            r, d = self._correction(mean, variance)
        scale, bias = (inputs.adjustment_scale, inputs.adjustment_bias) if plan.uses_adjustment else (None, None)
        transform = self._channels.transform(r, d, scale, bias)
        if transform is None:
            y, is_activated = self._elementwise(mean, variance, r, d), False
        else:
            scales, offsets = transform.scale(self._gamma), transform.offset(self._gamma, self._beta)
            y, is_activated = self._affine(scales, offsets, mean, variance), self._has_relu
        return Normalized(y, is_activated, mean, variance, (mean, variance), r, d)

    def _moments(self) -> tuple[Array, Array]:
        x = self._inputs.inputs
        if self._plan.uses_weights:
            wide = x.astype(self._channels.dtype, copy=False)
            return WeightedBatch.of(wide, self._inputs.batch_weights, self._plan.geometry).moments(self._xp)
        whole = self._normalization.by_batch(x, self._gamma, self._beta)
        return whole.reserve_space_1, whole.reserve_space_2

    def _correction(self, mean: Array, variance: Array) -> tuple[Array, Array]:
        """Returns r and d of a batch with these moments, through which no gradient flows.

        With s = sqrt(variance + epsilon), m and R the averages of mean and standard deviation before the update:

            r = s / R, from rmin to rmax;  d = (mean - m) / R, from -dmax to dmax

        where R is at least sqrt(epsilon). In the old form of renorm, averages that started at zero are completed by the
        batch: m = renorm_mean + (1 - renorm_mean_weight) mean, and R likewise.
        """
        xp, inputs, channels, config = self._xp, self._inputs, self._channels, self._attributes.config
        epsilon, clipping = config.epsilon, config.renorm_clipping
        stddev = xp.sqrt(variance + epsilon)
        center, spread = channels.offsets(inputs.renorm_mean), channels.scales(inputs.renorm_stddev)
        mean_weight, stddev_weight = inputs.renorm_mean_weight, inputs.renorm_stddev_weight
        if mean_weight is None or stddev_weight is None:
            spread = xp.maximum(spread, epsilon**0.5 if epsilon > 0 else 0)
        else:
            center = center + (1 - mean_weight) * mean
            spread = spread + (1 - stddev_weight) * stddev
        r, d = stddev / spread, (mean - center) / spread
        if "rmin" in clipping:
            r = xp.maximum(r, clipping["rmin"])
        if "rmax" in clipping:
            r = xp.minimum(r, clipping["rmax"])
        if "dmax" in clipping:
            d = xp.minimum(xp.maximum(d, -clipping["dmax"]), clipping["dmax"])
        return r.astype(channels.dtype), d.astype(channels.dtype)

    def _affine(self, scale: Array, offset: Array, mean: Array, variance: Array) -> Array:
        x = self._inputs.inputs
        return self._normalization.by_moments(x, scale, offset, mean, variance, has_relu=self._has_relu)

    def _elementwise(self, mean: Array, variance: Array, r: Array | None, d: Array | None) -> Array:
        """Normalises with an adjustment that varies within a channel."""
        inputs, channels = self._inputs, self._channels
        scale, bias = inputs.adjustment_scale, inputs.adjustment_bias
        assert scale is not None
        assert bias is not None
        y = corrected(self._normalization, channels, inputs.inputs, mean, variance, r, d)
        y *= scale.astype(channels.dtype)
        y += bias.astype(channels.dtype)
        y *= channels.broadcast(self._gamma)
        y += channels.broadcast(self._beta)
        return y.astype(inputs.inputs.dtype, copy=False)


class BackwardPass:
    """Computes one backward."""

    def __init__(
        self,
        xp: Any,
        batch_norm: BatchNorm,
        inputs: BackwardInputs,
        attributes: BackwardAttributes,
        plan: BackwardPlan,
    ) -> None:
        """Takes `xp`, NumPy or CuPy, the kernels, and the checked call."""
        config = attributes.config
        self._xp = xp
        self._inputs = inputs
        self._plan = plan
        self._epsilon = config.epsilon
        self._channels = Channels.of(xp, inputs.inputs, config.data_format)
        self._normalization = Normalization(batch_norm, plan.geometry, config.epsilon)
        self._through_moments = attributes.is_training and plan.geometry.count > 0
        # The relu was in the forward's kernel. The gradient kernel finds out from x where it was positive.
        self._has_fused_relu = config.activation_fn == "relu" and inputs.activation_saved is None
        self._gamma, self._beta = self._channels.scales(inputs.gamma), self._channels.offsets(inputs.beta)

    def gradients(self, dy: Array) -> BackwardOutputs:
        """Returns all gradients except the regularizers'; `dy` is with respect to the activation's input, T."""
        inputs = self._inputs
        if inputs.batch_weights is not None:
            return self._weighted(dy, inputs.batch_weights)
        scale, bias = inputs.adjustment_scale, inputs.adjustment_bias
        transform = self._channels.transform(inputs.r, inputs.d, scale, bias)
        if transform is not None:
            return self._transformed(dy, transform)
        assert scale is not None
        assert bias is not None
        return self._elementwise(dy, scale, bias)

    def _transformed(self, dy: Array, transform: "ChannelTransform") -> BackwardOutputs:
        inputs, gamma = self._inputs, self._gamma
        whole = self._normalization.gradient(
            dy,
            inputs.inputs,
            transform.scale(gamma),
            inputs.mean,
            inputs.variance,
            through_moments=self._through_moments,
            relu_offset=transform.offset(gamma, self._beta) if self._has_fused_relu else None,
        )
        dots, totals = whole.scale_backprop, whole.offset_backprop
        found = self._outputs(whole.x_backprop, totals, transform.gamma_gradient(dots, totals))
        if inputs.adjustment_scale is None:
            return found
        for_scale, for_bias = transform.scale_gradient(gamma, dots, totals), transform.bias_gradient(gamma, totals)
        return replace(
            found,
            adjustment_scale_gradient=_like(for_scale, inputs.adjustment_scale),
            adjustment_bias_gradient=_like(for_bias, inputs.adjustment_bias),
        )

    def _elementwise(self, dy: Array, given_scale: Array, given_bias: Array) -> BackwardOutputs:
        """Returns the gradients with an adjustment that varies within a channel; always in training."""
        inputs, channels = self._inputs, self._channels
        x, mean, variance, dtype = inputs.inputs, inputs.mean, inputs.variance, channels.dtype
        scale, bias = given_scale.astype(dtype), given_bias.astype(dtype)
        shape = channels.broadcast(self._gamma).shape
        adjusted = corrected(self._normalization, channels, x, mean, variance, inputs.r, inputs.d)
        wide = dy.astype(dtype, copy=False)
        for_beta = reduced_to(wide, shape)
        for_gamma = reduced_to(wide * (adjusted * scale + bias), shape)
        behind = wide * channels.broadcast(self._gamma)
        for_bias = _like(reduced_to(behind, bias.shape), given_bias)
        adjusted *= behind
        for_scale = _like(reduced_to(adjusted, scale.shape), given_scale)
        behind *= scale
        whole = self._normalization.gradient(
            behind,
            x.astype(dtype, copy=False),
            channels.scales(inputs.r),
            mean,
            variance,
            through_moments=self._through_moments,
        )
        for_inputs = whole.x_backprop.astype(x.dtype, copy=False)
        return replace(
            self._outputs(for_inputs, for_beta.reshape(-1), for_gamma.reshape(-1)),
            adjustment_scale_gradient=for_scale,
            adjustment_bias_gradient=for_bias,
        )

    def _weighted(self, dy: Array, weights: Array) -> BackwardOutputs:
        inputs, dtype, xp, gamma = self._inputs, self._channels.dtype, self._xp, self._gamma
        wide = inputs.inputs.astype(dtype, copy=False)
        whole = self._normalization.gradient(
            dy.astype(dtype, copy=False),
            wide,
            gamma,
            inputs.mean,
            inputs.variance,
            through_moments=False,
            relu_offset=self._beta if self._has_fused_relu else None,
        )
        batch = WeightedBatch.of(wide, weights, self._plan.geometry)
        through = MomentsGradient(
            mean=inputs.mean,
            inverse_deviation=1 / xp.sqrt(inputs.variance.astype("float64") + self._epsilon),
            totals=(gamma * whole.offset_backprop).astype("float64"),
            dots=(gamma * whole.scale_backprop).astype("float64"),
        )
        for_inputs = batch.inputs_gradient(xp, through).reshape(inputs.inputs.shape)
        for_inputs += whole.x_backprop
        for_inputs = for_inputs.astype(inputs.inputs.dtype, copy=False)
        found = self._outputs(for_inputs, whole.offset_backprop, whole.scale_backprop)
        if weights.dtype not in FLOATING:
            return found
        for_weights = batch.weights_gradient(xp, through, inputs.variance)
        return replace(found, batch_weights_gradient=for_weights.astype(weights.dtype))

    def _outputs(self, for_inputs: Array, for_beta: Array, for_gamma: Array) -> BackwardOutputs:
        """Returns the gradients of the inputs and of the existing variables, the latter in the variables' dtype."""
        beta, gamma = self._inputs.beta, self._inputs.gamma
        return BackwardOutputs(
            inputs_gradient=for_inputs,
            beta_gradient=None if beta is None else for_beta.astype(beta.dtype, copy=False),
            gamma_gradient=None if gamma is None else for_gamma.astype(gamma.dtype, copy=False),
        )


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


@dataclass(frozen=True)
class Channels:
    """The channels of some inputs.

    Attributes:
        xp: NumPy or CuPy.
        dtype: U, the dtype of arithmetic.
        count: The number of channels, C.
        axis: The axis of the channels, as a negative number.
    """

    xp: Any
    dtype: np.dtype[Any]
    count: int
    axis: int

    @classmethod
    def of(cls, xp: Any, x: Array, data_format: str) -> "Channels":
        """Returns the channels of inputs."""
        axis = channel_axis(len(x.shape), data_format)
        return cls(xp, widened(x.dtype), x.shape[axis], axis - len(x.shape))

    def broadcast(self, array: Array) -> Array:
        """Returns values of shape [C] in a shape that broadcasts to the inputs."""
        return array.reshape(self.count, *[1] * (-self.axis - 1))

    def filled(self, value: int) -> Array:
        """Returns the same value for all channels."""
        return self.xp.full(self.count, value, self.dtype)

    def scales(self, array: Array | None) -> Array:
        """Returns factors as U; ones if there are none."""
        return self.filled(1) if array is None else array.astype(self.dtype, copy=False)

    def offsets(self, array: Array | None) -> Array:
        """Returns summands as U; zeros if there are none."""
        return self.filled(0) if array is None else array.astype(self.dtype, copy=False)

    def transform(
        self, r: Array | None, d: Array | None, scale: Array | None, bias: Array | None
    ) -> ChannelTransform | None:
        """Returns the correction r, d and an adjustment together; None if the adjustment varies within a channel."""
        a = self.filled(1) if scale is None else per_channel(scale.astype(self.dtype), self.count, self.axis)
        b = self.filled(0) if bias is None else per_channel(bias.astype(self.dtype), self.count, self.axis)
        return None if a is None or b is None else ChannelTransform(self.scales(r), self.offsets(d), a, b)


@dataclass(frozen=True)
class Normalization:
    """FusedBatchNorm for inputs of one geometry and any rank, by the moments of the batch or by given ones.

    All per-channel arrays are U of shape [C].
    """

    batch_norm: BatchNorm
    geometry: fused.Geometry
    epsilon: float

    def by_batch(self, x: Array, scale: Array, offset: Array, *, has_relu: bool = False) -> fused.ForwardOutputs:
        """Normalises by the moments of x."""
        attributes = fused.ForwardAttributes(epsilon=self.epsilon, is_training=True)
        # The kernels do not read mean and variance: any arrays will do.
        inputs = fused.ForwardInputs(x, scale, offset, scale, scale)
        return self.batch_norm.forward(inputs, attributes, self.geometry, has_relu=has_relu)

    def by_moments(
        self, x: Array, scale: Array, offset: Array, mean: Array, variance: Array, *, has_relu: bool = False
    ) -> Array:
        """Normalises by the given moments."""
        attributes = fused.ForwardAttributes(epsilon=self.epsilon, is_training=False)
        inputs = fused.ForwardInputs(x, scale, offset, mean, variance)
        return self.batch_norm.forward(inputs, attributes, self.geometry, has_relu=has_relu).y

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
    ) -> fused.GradOutputs:
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
        attributes = fused.GradAttributes(epsilon=self.epsilon, is_training=through_moments)
        inputs = fused.GradInputs(dy, x, scale, mean, variance)
        return self.batch_norm.gradient(inputs, attributes, self.geometry, relu_offset)


def corrected(
    normalization: Normalization,
    channels: Channels,
    x: Array,
    mean: Array,
    variance: Array,
    r: Array | None,
    d: Array | None,
) -> Array:
    """Returns xhat r + d as U, to which an adjustment is applied."""
    wide = x.astype(channels.dtype, copy=False)
    return normalization.by_moments(wide, channels.scales(r), channels.offsets(d), mean, variance)


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


def _like(gradient: Array, array: Array) -> Array:
    """Returns a gradient, per channel or in the array's shape, in the shape and dtype of the array."""
    if gradient.size != array.size:
        gradient = gradient.sum()
    return gradient.reshape(array.shape).astype(array.dtype)
