"""LayerNorm."""

from typing import Any

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
