"""LayerNorm."""

from typing import Any

import torch

from gradserve.client import Client
from gradserve.torch.functions.served import Arrays, Computed, ServedOp


def layer_norm(
    client: Client, x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, *, epsilon: float = 1e-5
) -> torch.Tensor:
    """Normalises over the last dimensions, those of `scale`, as `RawOps.LayerNorm` and PyTorch's layer_norm do.

    One call of the server, and another one in the backward.

    Args:
        client: The client of the server that computes.
        x: float16, bfloat16, float32 or float64, of any shape that ends with that of `scale`.
        scale: float64 if x is, otherwise float32; of at least one dimension.
        offset: Like `scale`.
        epsilon: Added to the variance.

    Returns:
        (x - mean) / sqrt(variance + epsilon) * scale + offset, of the shape and dtype of x.

    Raises:
        InvalidArgumentError: A tensor has another shape or dtype.
        GradserveError: See `RawOps.LayerNorm`.
    """

    def forward(x: Any, scale: Any, offset: Any) -> Computed:
        outputs = client.raw_ops.LayerNorm(x=x, scale=scale, offset=offset, epsilon=epsilon)
        return Computed((outputs.y,), (outputs.mean, outputs.rstd))

    def backward(inputs: Any, _outputs: Any, moments: Any, gradients: Any) -> Arrays:
        x, scale, _ = inputs
        mean, rstd = moments
        return client.raw_ops.LayerNormGrad(y_backprop=gradients[0], x=x, scale=scale, mean=mean, rstd=rstd)

    (y,) = ServedOp(forward, backward, 1)(x, scale, offset)
    return y
