"""The mathematics of FusedBatchNorm, over NumPy or CuPy.

The kernels are compared with it. The formulas are those of TensorFlow's CPU kernels (`fused_batch_norm_op.cc`),
which follow Ioffe and Szegedy, "Batch Normalization", 2015.
"""

from typing import Any

from gradserve_server.devices.device import Array
from gradserve_server.ops.batch_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    Geometry,
    GradAttributes,
    GradInputs,
    GradOutputs,
)


def fused_batch_norm(
    xp: Any, inputs: ForwardInputs, attributes: ForwardAttributes, geometry: Geometry, *, has_relu: bool = False
) -> ForwardOutputs:
    """Normalises x over all its axes but the channels.

    y = (x - mean) / sqrt(variance + epsilon) * scale + offset, with the moments of x in training, and otherwise with
    the inputs `mean` and `variance`. Sums are computed in float64, everything else in U; y is rounded to T.

    With f = exponential_avg_factor and Bessel's correction B = M / max(M - 1, 1), in training
    batch_mean = (1 - f) mean + f mu and batch_variance = (1 - f) variance + f B var; for f = 1 the inputs are not read.

    With `has_relu`, y is max(y, 0).
    """
    param_dtype = inputs.scale.dtype
    x = inputs.x.reshape(geometry.shape).astype(param_dtype)
    zeros = xp.zeros(geometry.channels, param_dtype)
    reserve_space_3 = xp.zeros((), param_dtype)
    if geometry.count == 0:
        nan = xp.full(geometry.channels, xp.nan, param_dtype)
        return ForwardOutputs(xp.empty_like(inputs.x), nan, nan.copy(), zeros, zeros.copy(), reserve_space_3)
    if attributes.is_training:
        mean = _sums(x) / geometry.count
        deviations = x - mean.astype(param_dtype)[:, None]
        # The rounding of the mean matters if the deviations are small beside it.
        correction = _sums(deviations) / geometry.count
        # Squares of float32 overflow from 2e19 on, where their mean need not.
        squares = xp.square(deviations, dtype="float64")
        variance = (_sums(squares) / geometry.count - correction**2).astype(param_dtype)
        mean = mean.astype(param_dtype)
        saved_mean, saved_variance = mean, variance
        batch_mean, batch_variance = mean, variance * (geometry.count / max(geometry.count - 1, 1))
        factor = attributes.exponential_avg_factor
        if factor != 1:
            batch_mean = (1 - factor) * inputs.mean + factor * batch_mean
            batch_variance = (1 - factor) * inputs.variance + factor * batch_variance
    else:
        mean, variance = inputs.mean, inputs.variance
        saved_mean, saved_variance = zeros, zeros
        batch_mean, batch_variance = mean, variance
    multiplier = inputs.scale / xp.sqrt(variance + attributes.epsilon)
    y = (x - mean[:, None]) * multiplier[:, None] + inputs.offset[:, None]
    if has_relu:
        y = xp.maximum(y, 0)
    return ForwardOutputs(
        y=y.astype(inputs.x.dtype).reshape(inputs.x.shape),
        batch_mean=batch_mean.astype(param_dtype),
        batch_variance=batch_variance.astype(param_dtype),
        reserve_space_1=saved_mean.astype(param_dtype),
        reserve_space_2=saved_variance.astype(param_dtype),
        reserve_space_3=reserve_space_3,
    )


def fused_batch_norm_grad(
    xp: Any,
    inputs: GradInputs,
    attributes: GradAttributes,
    geometry: Geometry,
    relu_offset: Array | None = None,
) -> GradOutputs:
    """Computes the gradients of FusedBatchNorm with respect to x, scale and offset.

    With the reserve spaces m and v, used as they are, and c = 1 / sqrt(v + epsilon):

    offset_backprop = sum dy
    scale_backprop  = c sum dy (x - m)
    x_backprop      = scale c (dy - mean(dy) - (x - m) c^2 mean(dy (x - m)))  in training
                    = scale c dy                                              otherwise

    With `relu_offset`, the forward call's offset, dy is the gradient behind a relu: where (x - m) scale c + offset is
    not above 0, it counts as 0.
    """
    param_dtype = inputs.scale.dtype
    nothing = xp.empty(0, param_dtype)
    if geometry.count == 0:
        zeros = xp.zeros(geometry.channels, param_dtype)
        return GradOutputs(xp.empty_like(inputs.x), zeros, zeros.copy(), nothing, nothing.copy())
    x = inputs.x.reshape(geometry.shape).astype(param_dtype)
    dy = inputs.y_backprop.reshape(geometry.shape).astype(param_dtype)
    centered = x - inputs.reserve_space_1[:, None]
    deviation = xp.sqrt(inputs.reserve_space_2 + attributes.epsilon)
    if relu_offset is not None:
        y = centered * (inputs.scale / deviation)[:, None] + relu_offset[:, None]
        dy = xp.where(y > 0, dy, 0)
    inverse_deviation = 1 / deviation
    offset_backprop = _sums(dy)
    # A difference times about the inverse deviation leaves the product in about the range of dy. The factor is a power
    # of two, which costs no digits.
    _, exponents = xp.frexp(inverse_deviation)
    reduction = xp.ldexp(xp.ones_like(inverse_deviation), exponents)
    dot = _sums(dy * (centered * reduction[:, None])) * (inverse_deviation / reduction)
    x_backprop = dy
    if attributes.is_training:
        slope = (inverse_deviation * dot / geometry.count).astype(param_dtype)
        mean_of_dy = (offset_backprop / geometry.count).astype(param_dtype)
        x_backprop = dy - mean_of_dy[:, None] - centered * slope[:, None]
    x_backprop = x_backprop * (inputs.scale * inverse_deviation)[:, None]
    return GradOutputs(
        x_backprop=x_backprop.astype(inputs.x.dtype).reshape(inputs.x.shape),
        scale_backprop=dot.astype(param_dtype),
        offset_backprop=offset_backprop.astype(param_dtype),
        reserve_space_4=nothing,
        reserve_space_5=nothing.copy(),
    )


def _sums(array: Array) -> Array:
    """Returns the sums of [outer, channels, inner] for each channel, float64."""
    return array.sum(axis=(0, 2), dtype="float64")
