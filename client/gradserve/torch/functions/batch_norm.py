"""FusedBatchNorm."""

from typing import Any, NamedTuple

import torch

from gradserve.client import Client
from gradserve.errors import InvalidArgumentError
from gradserve.torch.functions.served import Arrays, Computed, ServedOp


class FusedBatchNorm(NamedTuple):
    """The outputs of `fused_batch_norm`.

    Attributes:
        y: The normalised images, of the shape and dtype of x.
        batch_mean: The new moving mean, shape [C]: in training (1 - f) mean + f mu, where f is `exponential_avg_factor`
            and mu the mean of x; otherwise `mean`. It has no gradient.
        batch_variance: The new moving variance, likewise, with the sample variance of x. It has no gradient.
    """

    y: torch.Tensor
    batch_mean: torch.Tensor
    batch_variance: torch.Tensor


def fused_batch_norm(
    client: Client,
    x: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    mean: torch.Tensor | None = None,
    variance: torch.Tensor | None = None,
    *,
    epsilon: float = 1e-4,
    exponential_avg_factor: float = 1.0,
    data_format: str = "NCHW",
    is_training: bool = True,
) -> FusedBatchNorm:
    """Normalises a batch of images or volumes over all axes but the channels, as `RawOps.FusedBatchNormV3` does.

    One call of the server, and another one in the backward. C is the number of channels.

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
        data_format: "NCHW" as in PyTorch, "NHWC", "NCDHW" or "NDHWC".
        is_training: Whether to normalise by the moments of x, or by `mean` and `variance`.

    Raises:
        InvalidArgumentError: A tensor has another shape or dtype, or `mean` or `variance` requires a gradient.
        GradserveError: See `RawOps.FusedBatchNormV3`.
    """
    for name, statistic in (("mean", mean), ("variance", variance)):
        if statistic is not None and statistic.requires_grad:
            raise InvalidArgumentError(
                f"expected a tensor without gradient for {name}, got one that requires a gradient, which "
                f"FusedBatchNorm does not compute; pass {name}.detach()",
                field=name,
            )
    how: dict[str, Any] = {"epsilon": epsilon, "data_format": data_format, "is_training": is_training}

    def forward(*inputs: Any) -> Computed:
        x, scale, offset, mean, variance = inputs
        outputs = client.raw_ops.FusedBatchNormV3(
            x=x,
            scale=scale,
            offset=offset,
            mean=[] if mean is None else mean,
            variance=[] if variance is None else variance,
            exponential_avg_factor=exponential_avg_factor,
            **how,
        )
        return Computed(outputs[:3], (outputs.reserve_space_1, outputs.reserve_space_2))

    def backward(inputs: Any, _outputs: Any, moments: Any, gradients: Any) -> Arrays:
        x, scale, _, mean, variance = inputs
        reserve_space_1, reserve_space_2 = moments if is_training else (mean, variance)
        computed = client.raw_ops.FusedBatchNormGradV3(
            y_backprop=gradients[0],
            x=x,
            scale=scale,
            reserve_space_1=reserve_space_1,
            reserve_space_2=reserve_space_2,
            **how,
        )
        return *computed[:3], None, None

    return FusedBatchNorm(*ServedOp(forward, backward, 1)(x, scale, offset, mean, variance))
