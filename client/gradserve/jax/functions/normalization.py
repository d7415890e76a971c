"""Batch and layer normalization."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradserve.client import Client
from gradserve.jax.functions.served import Arrays, ServedOp, as_array, like, parameter_dtype


def layer_norm(client: Client, x: Any, scale: Any, offset: Any, *, epsilon: float = 1e-5) -> jax.Array:
    """Normalises over the last dimensions, those of `scale`, as `RawOps.LayerNorm` does.

    One call of the server, and another one for the gradient.

    Args:
        client: The client of the server that computes.
        x: float16, bfloat16, float32 or float64, of any shape that ends with that of `scale`.
        scale: float64 if x is, otherwise float32; of at least one dimension.
        offset: Like `scale`.
        epsilon: Added to the variance.

    Returns:
        (x - mean) / sqrt(variance + epsilon) * scale + offset, of the shape and dtype of x.

    Raises:
        InvalidArgumentError: An array has another shape or dtype. Inside `jax.jit`, a JaxRuntimeError that says so.
        GradserveError: See `RawOps.LayerNorm`; likewise.
    """
    x = jnp.asarray(x)
    scale, offset = (as_array(each, parameter_dtype(x)) for each in (scale, offset))
    moments = like(scale, x.shape[: max(x.ndim - scale.ndim, 0)])

    def forward(x: Any, scale: Any, offset: Any) -> Arrays:
        return client.raw_ops.LayerNorm(x=x, scale=scale, offset=offset, epsilon=epsilon)

    def backward(inputs: Any, results: Any, gradients: Any) -> Arrays:
        (x, scale, _), (_, mean, rstd), (y_backprop,) = inputs, results, gradients
        return client.raw_ops.LayerNormGrad(y_backprop=y_backprop, x=x, scale=scale, mean=mean, rstd=rstd)

    op = ServedOp(
        "layer_norm",
        forward,
        backward,
        results=(like(x), moments, moments),
        num_outputs=1,
        num_served=1,
        differentiable=("x", "scale", "offset"),
    )
    (y,) = op(x, scale, offset)
    return y


class FusedBatchNorm(NamedTuple):
    """The outputs of `fused_batch_norm`.

    Attributes:
        y: The normalised images, of the shape and dtype of x.
        batch_mean: The new moving mean, shape [C]: in training (1 - f) mean + f mu, where f is `exponential_avg_factor`
            and mu the mean of x; otherwise `mean`.
        batch_variance: The new moving variance, likewise, with the sample variance of x.
    """

    y: jax.Array
    batch_mean: jax.Array
    batch_variance: jax.Array


def fused_batch_norm(
    client: Client,
    x: Any,
    scale: Any,
    offset: Any,
    mean: Any = None,
    variance: Any = None,
    *,
    epsilon: float = 1e-4,
    exponential_avg_factor: float = 1.0,
    data_format: str = "NHWC",
    is_training: bool = True,
) -> FusedBatchNorm:
    """Normalises a batch of images or volumes over all axes but the channels, as `RawOps.FusedBatchNormV3` does.

    One call of the server, and another one for the gradient. In training, batch_mean and batch_variance have gradients
    with respect to x, too. C is the number of channels.

    Args:
        client: The client of the server that computes.
        x: float16, bfloat16, float32 or float64, of rank 4, or 5 for the formats with a D.
        scale: Shape [C]: float64 if x is, otherwise float32.
        offset: Likewise.
        mean: Likewise: the population mean, or in training the moving mean. None: not needed, in training with an
            `exponential_avg_factor` of 1. It has no gradient.
        variance: Like `mean`, for the variance.
        epsilon: Added to the variance.
        exponential_avg_factor: The weight of the moments of x in the moving averages, in training.
        data_format: "NHWC" as in JAX's libraries, "NCHW", "NDHWC" or "NCDHW".
        is_training: Whether to normalise by the moments of x, or by `mean` and `variance`.

    Raises:
        InvalidArgumentError: An array has another shape or dtype: inside `jax.jit`, a JaxRuntimeError that says so. Or
            there is a gradient with respect to `mean` or `variance`.
        GradserveError: See `RawOps.FusedBatchNormV3`; inside `jax.jit` a JaxRuntimeError, too.
    """
    x = jnp.asarray(x)
    dtype = parameter_dtype(x)
    scale, offset, *moving = (as_array([] if each is None else each, dtype) for each in (scale, offset, mean, variance))
    how: dict[str, Any] = {"epsilon": epsilon, "data_format": data_format, "is_training": is_training}

    def forward(x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> Arrays:
        return client.raw_ops.FusedBatchNormV3(
            x=x,
            scale=scale,
            offset=offset,
            mean=mean,
            variance=variance,
            exponential_avg_factor=exponential_avg_factor,
            **how,
        )[:5]

    def backward(inputs: Any, results: Any, gradients: Any) -> Arrays:
        x, scale, _, *population = inputs
        reserve_space_1, reserve_space_2 = results[3:] if is_training else population
        return client.raw_ops.FusedBatchNormGradV3(
            y_backprop=gradients[0],
            x=x,
            scale=scale,
            reserve_space_1=reserve_space_1,
            reserve_space_2=reserve_space_2,
            **how,
        )[:3]

    def through_moments(inputs: Arrays, results: Arrays, gradients: Arrays, computed: Arrays) -> Arrays:
        x, scale, x_backprop = inputs[0], inputs[1], computed[0]
        of_mean, of_variance = gradients
        channel_axis = 1 if data_format.startswith("NC") else max(x.ndim - 1, 0)
        channels = x.shape[channel_axis : channel_axis + 1]
        # Without training, the two are copies of mean and variance. The server refuses scale of another shape.
        if not is_training or scale.shape != channels:
            return computed
        per_channel = [*(1 for _ in x.shape[:channel_axis]), *channels, *(1 for _ in x.shape[channel_axis + 1 :])]
        count = x.size // max(*channels, 1)
        total = x_backprop.astype(dtype)
        if of_mean is not None:
            total += (exponential_avg_factor / max(count, 1) * of_mean).reshape(per_channel)
        if of_variance is not None:
            slope = 2 * exponential_avg_factor / max(count - 1, 1) * of_variance
            total += (x.astype(dtype) - results[3].reshape(per_channel)) * slope.reshape(per_channel)
        return total.astype(x.dtype), *computed[1:]

    op = ServedOp(
        "fused_batch_norm",
        forward,
        backward,
        results=(like(x), *[like(scale)] * 4),
        num_outputs=3,
        num_served=1,
        differentiable=("x", "scale", "offset"),
        others=("mean", "variance"),
        rest=through_moments,
    )
    return FusedBatchNorm(*op(x, scale, offset, *moving))
