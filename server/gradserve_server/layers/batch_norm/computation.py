"""What computes a layer on a device: the kernels of FusedBatchNorm, and arithmetic with one number for each channel.

With xhat = (x - mean) / s and s = sqrt(variance + epsilon), every implementation of the layer gives

    y = activation(((xhat r + d) a + b) gamma + beta)

where r and d are the correction of renorm (else 1 and 0) and a and b the adjustment (else 1 and 0). As long as all of
these have one value for each channel, that is FusedBatchNorm with another scale and offset, and so are its gradients.
A relu is computed along with it, where the device can; nothing is saved for its gradient then.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from gradserve_server.devices.device import Array, Device
from gradserve_server.layers.batch_norm.adjustment import ChannelTransform, per_channel, reduced_to
from gradserve_server.layers.batch_norm.config import BatchNormConfig
from gradserve_server.layers.batch_norm.implementation import Implementation
from gradserve_server.layers.batch_norm.normalization import Normalization
from gradserve_server.layers.batch_norm.preparation import small_calls
from gradserve_server.layers.batch_norm.renorm import RenormAverages, correction
from gradserve_server.layers.batch_norm.spec import (
    BackwardAttributes,
    BackwardInputs,
    BackwardOutputs,
    BackwardPlan,
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    ForwardPlan,
    channel_axis,
    channel_shape,
)
from gradserve_server.layers.batch_norm.updates import UpdateAttributes, UpdateInputs, UpdateOutputs, update
from gradserve_server.layers.batch_norm.weighting import MomentsGradient, WeightedBatch
from gradserve_server.ops.activation.activation import Activation
from gradserve_server.ops.activation.spec import gradient_of_result
from gradserve_server.ops.batch_norm.batch_norm import BatchNorm
from gradserve_server.ops.batch_norm.spec import Geometry
from gradserve_server.ops.dtypes import FLOATING, widened


class LayerComputation:
    """Computes on the device that its parts compute on. Safe to use from several threads."""

    def __init__(self, device: Device, xp: Any, batch_norm: BatchNorm, activation: Activation) -> None:
        """Takes NumPy or CuPy, as the device has it, and the families of ops on the device."""
        self._device = device
        self._xp = xp
        self._batch_norm = batch_norm
        self._activation = activation

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Has CuPy compile its arithmetic; ends early, between two calls, once `stop()`."""
        if self._xp is np:  # which has nothing to compile
            return
        for call in small_calls():
            if stop():
                return
            call.compute(self._device, self)

    def forward(self, inputs: ForwardInputs, attributes: ForwardAttributes, plan: ForwardPlan) -> ForwardOutputs:
        """Normalises, inside the device's `computing`.

        Raises:
            MemoryError: There is not enough memory for the outputs.
        """
        with np.errstate(all="ignore"):
            y, statistics, is_activated = self._normalized(inputs, attributes, plan)
            saved = {name: statistics[name] for name in ("mean", "variance", "r", "d") if name in statistics}
            batch = {name: statistics[name] for name in ("batch_mean", "batch_variance") if name in statistics}
            losses = self._losses(inputs, attributes.config, plan.implementation)
            y, activation_saved = (y, None) if is_activated else self._activated(y, attributes)
        if not attributes.saves:
            saved, activation_saved = {}, None
        return ForwardOutputs(outputs=y, activation_saved=activation_saved, **batch, **saved, **losses)

    def backward(self, inputs: BackwardInputs, attributes: BackwardAttributes, plan: BackwardPlan) -> BackwardOutputs:
        """Computes gradients, inside the device's `computing`.

        Raises:
            MemoryError: There is not enough memory for the outputs.
        """
        with np.errstate(all="ignore"):
            dy = inputs.outputs_gradient
            if inputs.activation_saved is not None:
                dy = self._device.empty(dy.shape, dy.dtype)
                name = attributes.config.activation_fn
                self._activation.gradient(name, inputs.outputs_gradient, inputs.activation_saved, dy)
            if inputs.batch_weights is not None:
                gradients = self._weighted_gradients(dy, inputs, attributes.config, plan.geometry)
            else:
                gradients = self._gradients(dy, inputs, attributes, plan.geometry)
            return BackwardOutputs(**gradients, **self._regularization_gradients(inputs, attributes))

    def update(self, inputs: UpdateInputs, attributes: UpdateAttributes) -> UpdateOutputs:
        """Computes the next values of the moving averages."""
        with np.errstate(all="ignore"):
            return update(self._xp, inputs, attributes)

    def _normalized(
        self, inputs: ForwardInputs, attributes: ForwardAttributes, plan: ForwardPlan
    ) -> tuple[Array, dict[str, Array], bool]:
        """Returns y, the statistics of `ForwardOutputs`, and whether y is what the activation gives already."""
        config, x, xp = attributes.config, inputs.inputs, self._xp
        dtype, channels = widened(x.dtype), plan.geometry.channels
        gamma, beta = self._or(inputs.gamma, 1, channels, dtype), self._or(inputs.beta, 0, channels, dtype)
        normalization = Normalization(self._batch_norm, plan.geometry, config.epsilon)
        has_relu = config.activation_fn == "relu" and normalization.fuses_relu
        if not attributes.is_training or plan.geometry.count == 0:
            mean = self._or(inputs.moving_mean, 0, channels, dtype)
            variance = self._or(inputs.moving_variance, 1, channels, dtype)
            y = normalization.by_moments(x, gamma, beta, mean, variance, has_relu=has_relu)
            return y, {"mean": mean, "variance": variance}, has_relu
        if not (plan.uses_weights or plan.uses_adjustment or config.renorm):
            whole = normalization.by_batch(x, gamma, beta, has_relu=has_relu)
            mean, variance = whole.reserve_space_1, whole.reserve_space_2
            fed = whole.batch_variance if plan.implementation.is_fused else variance
            return whole.y, {"mean": mean, "variance": variance, "batch_mean": mean, "batch_variance": fed}, has_relu
        if plan.uses_weights:
            batch = WeightedBatch.of(x.astype(dtype, copy=False), inputs.batch_weights, plan.geometry)
            mean, variance = batch.moments(xp)
        else:
            whole = normalization.by_batch(x, gamma, beta)
            mean, variance = whole.reserve_space_1, whole.reserve_space_2
        statistics = {"mean": mean, "variance": variance, "batch_mean": mean, "batch_variance": variance}
        if config.renorm:
            averages = _averages(inputs, dtype)
            r, d = correction(xp, averages, mean, variance, config.epsilon, config.renorm_clipping)
            statistics |= {"r": r.astype(dtype), "d": d.astype(dtype)}
        scale, bias = (inputs.adjustment_scale, inputs.adjustment_bias) if plan.uses_adjustment else (None, None)
        transform = self._channel_transform(x, config, statistics, scale, bias)
        if transform is not None:
            scale, offset = transform.scale(gamma), transform.offset(gamma, beta)
            y = normalization.by_moments(x, scale, offset, mean, variance, has_relu=has_relu)
            return y, statistics, has_relu
        assert scale is not None
        assert bias is not None
        y = self._corrected(normalization, x, statistics)
        shape = channel_shape(len(x.shape), config.data_format, channels)
        y *= scale.astype(dtype)
        y += bias.astype(dtype)
        y *= gamma.reshape(shape)
        y += beta.reshape(shape)
        return y.astype(x.dtype, copy=False), statistics, False

    def _gradients(
        self, dy: Array, inputs: BackwardInputs, attributes: BackwardAttributes, geometry: Geometry
    ) -> dict[str, Array]:
        config, x, mean, variance = attributes.config, inputs.inputs, inputs.mean, inputs.variance
        gamma = self._or(inputs.gamma, 1, geometry.channels, mean.dtype)
        normalization = Normalization(self._batch_norm, geometry, config.epsilon)
        scale, bias = inputs.adjustment_scale, inputs.adjustment_bias
        statistics = {name: getattr(inputs, name) for name in ("mean", "variance", "r", "d")}
        transform = self._channel_transform(x, config, statistics, scale, bias)
        if transform is None:
            return self._elementwise_gradients(dy, inputs, config, gamma, normalization)
        relu_offset = None
        if _has_fused_relu(inputs, config):
            relu_offset = transform.offset(gamma, self._or(inputs.beta, 0, geometry.channels, mean.dtype))
        whole = normalization.gradient(
            dy,
            x,
            transform.scale(gamma),
            mean,
            variance,
            through_moments=attributes.is_training and geometry.count > 0,
            relu_offset=relu_offset,
        )
        dots, totals = whole.scale_backprop, whole.offset_backprop
        found = _for_variables(inputs, totals, transform.gamma_gradient(dots, totals))
        if scale is not None:
            for_scale, for_bias = transform.scale_gradient(gamma, dots, totals), transform.bias_gradient(gamma, totals)
            found["adjustment_scale_gradient"] = _like(for_scale, scale)
            found["adjustment_bias_gradient"] = _like(for_bias, bias)
        return {"inputs_gradient": whole.x_backprop, **found}

    def _elementwise_gradients(
        self, dy: Array, inputs: BackwardInputs, config: BatchNormConfig, gamma: Array, normalization: Normalization
    ) -> dict[str, Array]:
        """With an adjustment that varies within a channel; always in training."""
        x, dtype = inputs.inputs, inputs.mean.dtype
        shape = channel_shape(len(x.shape), config.data_format, normalization.geometry.channels)
        given_scale, given_bias = inputs.adjustment_scale, inputs.adjustment_bias
        assert given_scale is not None
        assert given_bias is not None
        scale, bias = given_scale.astype(dtype), given_bias.astype(dtype)
        statistics = {name: getattr(inputs, name) for name in ("mean", "variance", "r", "d")}
        corrected = self._corrected(normalization, x, statistics)
        wide = dy.astype(dtype, copy=False)
        for_beta = reduced_to(wide, shape)
        for_gamma = reduced_to(wide * (corrected * scale + bias), shape)
        behind = wide * gamma.reshape(shape)
        found = _for_variables(inputs, for_beta.reshape(-1), for_gamma.reshape(-1))
        found["adjustment_bias_gradient"] = _like(reduced_to(behind, bias.shape), given_bias)
        corrected *= behind
        found["adjustment_scale_gradient"] = _like(reduced_to(corrected, scale.shape), given_scale)
        behind *= scale
        r = self._or(inputs.r, 1, normalization.geometry.channels, dtype)
        whole = normalization.gradient(
            behind, x.astype(dtype, copy=False), r, inputs.mean, inputs.variance, through_moments=True
        )
        return {"inputs_gradient": whole.x_backprop.astype(x.dtype, copy=False), **found}

    def _weighted_gradients(
        self, dy: Array, inputs: BackwardInputs, config: BatchNormConfig, geometry: Geometry
    ) -> dict[str, Array]:
        x, dtype, xp, weights = inputs.inputs, inputs.mean.dtype, self._xp, inputs.batch_weights
        assert weights is not None
        wide = x.astype(dtype, copy=False)
        gamma = self._or(inputs.gamma, 1, geometry.channels, dtype)
        normalization = Normalization(self._batch_norm, geometry, config.epsilon)
        whole = normalization.gradient(
            dy.astype(dtype, copy=False),
            wide,
            gamma,
            inputs.mean,
            inputs.variance,
            through_moments=False,
            relu_offset=self._or(inputs.beta, 0, geometry.channels, dtype) if _has_fused_relu(inputs, config) else None,
        )
        found = _for_variables(inputs, whole.offset_backprop, whole.scale_backprop)
        batch = WeightedBatch.of(wide, weights, geometry)
        through = MomentsGradient(
            mean=inputs.mean,
            inverse_deviation=1 / xp.sqrt(inputs.variance.astype("float64") + config.epsilon),
            totals=(gamma * whole.offset_backprop).astype("float64"),
            dots=(gamma * whole.scale_backprop).astype("float64"),
        )
        for_inputs = batch.inputs_gradient(xp, through).reshape(x.shape)
        for_inputs += whole.x_backprop
        if weights.dtype in FLOATING:
            for_weights = batch.weights_gradient(xp, through, inputs.variance)
            found["batch_weights_gradient"] = for_weights.astype(weights.dtype)
        return {"inputs_gradient": for_inputs.astype(x.dtype, copy=False), **found}

    def _corrected(self, normalization: Normalization, x: Array, statistics: dict[str, Array]) -> Array:
        """Returns xhat r + d, in the dtype of arithmetic."""
        mean, variance, channels = statistics["mean"], statistics["variance"], normalization.geometry.channels
        r = self._or(statistics.get("r"), 1, channels, mean.dtype)
        d = self._or(statistics.get("d"), 0, channels, mean.dtype)
        return normalization.by_moments(x.astype(mean.dtype, copy=False), r, d, mean, variance)

    def _channel_transform(
        self, x: Array, config: BatchNormConfig, statistics: dict[str, Array], scale: Array | None, bias: Array | None
    ) -> ChannelTransform | None:
        """Returns nothing where the adjustment does not have one value for each channel."""
        dtype, axis = widened(x.dtype), channel_axis(len(x.shape), config.data_format)
        channels = x.shape[axis]
        a, b = (
            self._or(None, neutral, channels, dtype)
            if array is None
            else per_channel(array.astype(dtype), channels, axis - len(x.shape))
            for array, neutral in ((scale, 1), (bias, 0))
        )
        if a is None or b is None:
            return None
        r, d = (self._or(statistics.get(name), neutral, channels, dtype) for name, neutral in (("r", 1), ("d", 0)))
        return ChannelTransform(r, d, a, b)

    def _activated(self, y: Array, attributes: ForwardAttributes) -> tuple[Array, Array | None]:
        """Returns the outputs, and what the gradient of the activation is a function of."""
        name = attributes.config.activation_fn
        if not name:
            return y, None
        if gradient_of_result(name) or not attributes.saves:
            self._activation.forward(name, y, y)
            return y, y
        outputs = self._device.empty(y.shape, y.dtype)
        self._activation.forward(name, y, outputs)
        return outputs, y

    def _losses(
        self, inputs: ForwardInputs, config: BatchNormConfig, implementation: Implementation
    ) -> dict[str, Array]:
        if implementation is Implementation.LEGACY:
            return {}
        regularized = {name: config.regularizer_of(name) for name in ("beta", "gamma")}
        return {
            f"{name}_regularization_loss": self._xp.asarray(regularizer.loss(self._xp, getattr(inputs, name)))
            for name, regularizer in regularized.items()
            if regularizer is not None
        }

    def _regularization_gradients(self, inputs: BackwardInputs, attributes: BackwardAttributes) -> dict[str, Array]:
        if attributes.implementation is Implementation.LEGACY:
            return {}
        regularized = {name: attributes.config.regularizer_of(name) for name in ("beta", "gamma")}
        return {
            f"{name}_regularization_gradient": regularizer.gradient(self._xp, getattr(inputs, name))
            for name, regularizer in regularized.items()
            if regularizer is not None
        }

    def _or(self, array: Array | None, neutral: int, channels: int, dtype: np.dtype[Any]) -> Array:
        """Returns an array in a dtype, or one of a neutral element for each channel where there is none."""
        if array is None:
            return self._xp.full(channels, neutral, dtype)
        return array.astype(dtype, copy=False)


def _has_fused_relu(inputs: BackwardInputs, config: BatchNormConfig) -> bool:
    """Tells whether the forward left it to the kernels."""
    return config.activation_fn == "relu" and inputs.activation_saved is None


def _averages(inputs: ForwardInputs, dtype: np.dtype[Any]) -> RenormAverages:
    assert inputs.renorm_mean is not None
    assert inputs.renorm_stddev is not None
    mean, stddev = inputs.renorm_mean.astype(dtype), inputs.renorm_stddev.astype(dtype)
    mean_weight, stddev_weight = inputs.renorm_mean_weight, inputs.renorm_stddev_weight
    if mean_weight is None or stddev_weight is None:
        return RenormAverages(mean, stddev)
    return RenormAverages(mean, stddev, (mean_weight, stddev_weight))


def _for_variables(inputs: BackwardInputs, for_beta: Array, for_gamma: Array) -> dict[str, Array]:
    """Returns the gradients of the variables that there are, in their dtype."""
    found = {"beta": for_beta, "gamma": for_gamma}
    variables = {name: getattr(inputs, name) for name in found}
    return {
        f"{name}_gradient": found[name].astype(variable.dtype, copy=False)
        for name, variable in variables.items()
        if variable is not None
    }


def _like(gradient: Array, array: Array) -> Array:
    """Returns a gradient for each channel, or of the array's shape, as that of an array that broadcasts."""
    if gradient.size != array.size:
        gradient = gradient.sum()
    return gradient.reshape(array.shape).astype(array.dtype)
