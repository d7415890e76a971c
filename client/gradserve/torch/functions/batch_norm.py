"""FusedBatchNorm."""

from typing import Any, NamedTuple

import torch

from gradserve.client import Client
from gradserve.torch.functions.normalization import second_derivative
from gradserve.torch.functions.served import (
    checked_name,
    differentiable,
    keep_client,
    plain,
    served_op,
    statistics_dtype,
)
from gradserve_protocol.errors import InvalidArgumentError


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

    One call of the server, and another one in the backward. Second derivatives are computed by PyTorch. C is the number
    of channels.

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
    name = checked_name(client, x=x, scale=scale, offset=offset, mean=mean, variance=variance)
    for argument, statistic in (("mean", mean), ("variance", variance)):
        if statistic is not None and statistic.requires_grad:
            raise InvalidArgumentError(
                f"expected a tensor without gradient for {argument}, got one that requires a gradient, which "
                f"FusedBatchNorm does not compute; pass {argument}.detach()",
                field=argument,
            )
    y, batch_mean, batch_variance, _, _ = _batch_norm(
        name,
        x,
        scale,
        offset,
        mean,
        variance,
        plain(float, epsilon, "epsilon"),
        plain(float, exponential_avg_factor, "exponential_avg_factor"),
        plain(str, data_format, "data_format"),
        plain(bool, is_training, "is_training"),
    )
    return FusedBatchNorm(y, batch_mean, batch_variance)


def _fake(_client: str, x: torch.Tensor, scale: torch.Tensor, *_: Any) -> Any:
    statistics = [x.new_empty(scale.shape, dtype=statistics_dtype(x.dtype)) for _ in range(4)]
    return x.new_empty(x.shape), *statistics


@served_op(
    "fused_batch_norm(str client, Tensor x, Tensor scale, Tensor offset, Tensor? mean, Tensor? variance, "
    "float epsilon, float exponential_avg_factor, str data_format, bool is_training) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake,
)
def _op(
    client: Client,
    x: Any,
    scale: Any,
    offset: Any,
    mean: Any,
    variance: Any,
    epsilon: float,
    exponential_avg_factor: float,
    data_format: str,
    is_training: bool,
) -> Any:
    outputs = client.raw_ops.FusedBatchNormV3(
        x=x,
        scale=scale,
        offset=offset,
        mean=[] if mean is None else mean,
        variance=[] if variance is None else variance,
        epsilon=epsilon,
        exponential_avg_factor=exponential_avg_factor,
        data_format=data_format,
        is_training=is_training,
    )
    return outputs[:5]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    client, x, scale, _, mean, variance, ctx.epsilon, _, ctx.data_format, ctx.is_training = inputs
    _, *statistics, reserve_space_1, reserve_space_2 = output
    keep_client(ctx, client)
    ctx.mark_non_differentiable(*statistics, reserve_space_1, reserve_space_2)
    moments = (reserve_space_1, reserve_space_2) if ctx.is_training else (mean, variance)
    ctx.save_for_backward(x, scale, *moments)


def _backward(ctx: Any, dy: torch.Tensor, *_: Any) -> Any:
    gradients = _batch_norm_grad(ctx.client, dy, *ctx.saved_tensors, ctx.epsilon, ctx.data_format, ctx.is_training)
    return None, *gradients, *(None,) * 6


def _fake_grad(_client: str, _dy: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, *_: Any) -> Any:
    return x.new_empty(x.shape), scale.new_empty(scale.shape), scale.new_empty(scale.shape)


@served_op(
    "fused_batch_norm_grad(str client, Tensor dy, Tensor x, Tensor scale, Tensor reserve_space_1, "
    "Tensor reserve_space_2, float epsilon, str data_format, bool is_training) -> (Tensor, Tensor, Tensor)",
    _fake_grad,
)
def _grad_op(
    client: Client,
    dy: Any,
    x: Any,
    scale: Any,
    reserve_space_1: Any,
    reserve_space_2: Any,
    epsilon: float,
    data_format: str,
    is_training: bool,
) -> Any:
    gradients = client.raw_ops.FusedBatchNormGradV3(
        y_backprop=dy,
        x=x,
        scale=scale,
        reserve_space_1=reserve_space_1,
        reserve_space_2=reserve_space_2,
        epsilon=epsilon,
        data_format=data_format,
        is_training=is_training,
    )
    return gradients[:3]


def _setup_grad(ctx: Any, inputs: Any, _output: Any) -> None:
    _, dy, x, scale, mean, variance, ctx.epsilon, ctx.data_format, ctx.is_training = inputs
    ctx.save_for_backward(dy, x, scale, mean, variance)


def _backward_of_grad(ctx: Any, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    dy, x, scale, *moments = ctx.saved_tensors
    channel = 1 if ctx.data_format.startswith("NC") else x.dim() - 1
    shape = tuple(-1 if axis == channel else 1 for axis in range(x.dim()))
    inner = second_derivative(
        (v, a.reshape(shape), b.reshape(shape)),
        dy,
        x,
        scale.reshape(shape),
        axes=tuple(axis for axis in range(x.dim()) if axis != channel),
        epsilon=ctx.epsilon,
        moments=None if ctx.is_training else (moments[0].reshape(shape), moments[1].reshape(shape)),
    )
    return None, inner.dy, inner.x, inner.scale.reshape(scale.shape), *(None,) * 5


_batch_norm_grad = differentiable(_grad_op, _setup_grad, _backward_of_grad)
_batch_norm = differentiable(_op, _setup, _backward)
