"""The gradients of a forward, given the gradient with respect to the input of its activation."""

from dataclasses import replace
from typing import Any

from gradserve_server.devices.device import Array
from gradserve_server.layers.batch_norm.adjustment import ChannelTransform, reduced_to
from gradserve_server.layers.batch_norm.channels import Channels
from gradserve_server.layers.batch_norm.forward_pass import corrected
from gradserve_server.layers.batch_norm.normalization import Normalization
from gradserve_server.layers.batch_norm.spec import BackwardAttributes, BackwardInputs, BackwardOutputs, BackwardPlan
from gradserve_server.layers.batch_norm.weighting import MomentsGradient, WeightedBatch
from gradserve_server.ops.batch_norm.spec import BatchNorm
from gradserve_server.ops.dtypes import FLOATING


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

    def _transformed(self, dy: Array, transform: ChannelTransform) -> BackwardOutputs:
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


def _like(gradient: Array, array: Array) -> Array:
    """Returns a gradient, per channel or in the array's shape, in the shape and dtype of the array."""
    if gradient.size != array.size:
        gradient = gradient.sum()
    return gradient.reshape(array.shape).astype(array.dtype)
