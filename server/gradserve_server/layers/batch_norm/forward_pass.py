"""The normalization of a forward: everything but the activation."""

from dataclasses import dataclass
from typing import Any

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.channels import Channels
from gradserve_server.layers.batch_norm.normalization import Normalization
from gradserve_server.layers.batch_norm.renorm import RenormAverages, correction
from gradserve_server.layers.batch_norm.spec import ForwardAttributes, ForwardInputs, ForwardPlan
from gradserve_server.layers.batch_norm.weighting import WeightedBatch
from gradserve_server.ops.batch_norm.spec import BatchNorm


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
        self._has_relu = config.activation_fn == "relu" and self._normalization.fuses_relu
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
        config, dtype = self._attributes.config, self._channels.dtype
        averages = _averages(self._inputs, self._channels)
        r, d = correction(self._xp, averages, mean, variance, config.epsilon, config.renorm_clipping)
        return r.astype(dtype), d.astype(dtype)

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


def _averages(inputs: ForwardInputs, channels: Channels) -> RenormAverages:
    mean, stddev = channels.offsets(inputs.renorm_mean), channels.scales(inputs.renorm_stddev)
    mean_weight, stddev_weight = inputs.renorm_mean_weight, inputs.renorm_stddev_weight
    if mean_weight is None or stddev_weight is None:
        return RenormAverages(mean, stddev)
    return RenormAverages(mean, stddev, (mean_weight, stddev_weight))
