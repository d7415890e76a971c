"""The mathematics of LayerNorm, for NumPy or CuPy.

The kernels are compared with it. The formulas are PyTorch's, after Ba, Kiros and Hinton, "Layer Normalization", 2016.
Everything is computed in U, except sums, which are in float64; y and x_backprop are rounded to T.
"""

from typing import Any

from gradserve_server.devices.device import Array
from gradserve_server.ops.layer_norm.spec import (
    ForwardAttributes,
    ForwardInputs,
    ForwardOutputs,
    Geometry,
    GradInputs,
    GradOutputs,
)


def layer_norm(xp: Any, inputs: ForwardInputs, attributes: ForwardAttributes, geometry: Geometry) -> ForwardOutputs:
    """Normalizes each group of x.

    y = (x - mean) rstd scale + offset with rstd = 1 / sqrt(variance + epsilon); mean and population variance are the
    group's. Groups without elements have a mean of 0 and an rstd of NaN.
    """
    dtype, size = inputs.scale.dtype, geometry.size
    if size == 0:
        zeros, nan = xp.zeros(geometry.stats_shape, dtype), xp.full(geometry.stats_shape, xp.nan, dtype)
        return ForwardOutputs(xp.empty_like(inputs.x), zeros, nan)
    x = inputs.x.reshape(geometry.shape).astype(dtype)
    mean = (_sums(x, axis=1) / size).astype(dtype)
    deviations = x - mean[:, None]
    # The mean was rounded, which matters if the deviations are small compared to it.
    correction = _sums(deviations, axis=1) / size
    # Squares of float32 overflow from 2e19 on, and lose digits below 1e-16.
    variance = _sums(xp.square(deviations, dtype="float64"), axis=1) / size - correction**2
    rstd = (1 / xp.sqrt(variance + attributes.epsilon)).astype(dtype)
    normalized = (deviations - correction.astype(dtype)[:, None]) * rstd[:, None]
    y = normalized * inputs.scale.reshape(-1) + inputs.offset.reshape(-1)
    return ForwardOutputs(
        y=y.astype(inputs.x.dtype).reshape(inputs.x.shape),
        mean=mean.reshape(geometry.stats_shape),
        rstd=rstd.reshape(geometry.stats_shape),
    )


def layer_norm_grad(xp: Any, inputs: GradInputs, geometry: Geometry) -> GradOutputs:
    """Computes the gradients with respect to x, scale and offset, for the given mean and rstd.

    With n = (x - mean) rstd and g = dy scale, and means over a group:

    x_backprop      = rstd (g - mean(g) - n mean(g n))
    scale_backprop  = sum of dy n over the groups
    offset_backprop = sum of dy over the groups
    """
    dtype, size = inputs.scale.dtype, geometry.size
    dy, x = (array.reshape(geometry.shape).astype(dtype) for array in (inputs.y_backprop, inputs.x))
    rstd = inputs.rstd.reshape(-1, 1)
    normalized = (x - inputs.mean.reshape(-1, 1)) * rstd
    g = dy * inputs.scale.reshape(-1)
    mean_of_g, mean_of_g_n = (
        (_sums(terms, axis=1) / max(size, 1)).astype(dtype)[:, None] for terms in (g, g * normalized)
    )
    x_backprop = rstd * (g - mean_of_g - normalized * mean_of_g_n)
    return GradOutputs(
        x_backprop=x_backprop.astype(inputs.x.dtype).reshape(inputs.x.shape),
        scale_backprop=_sums(dy * normalized, axis=0).astype(dtype).reshape(inputs.scale.shape),
        offset_backprop=_sums(dy, axis=0).astype(dtype).reshape(inputs.scale.shape),
    )


def _sums(array: Array, axis: int) -> Array:
    return array.sum(axis=axis, dtype="float64")
