"""Normalizations: FusedBatchNorm and LayerNorm, and the derivative of their gradients in PyTorch's own operations."""

from typing import Any, NamedTuple

import torch

from gradserve.client import Client
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


def _batch_norm_fake(_client: str, x: torch.Tensor, scale: torch.Tensor, *_: Any) -> Any:
    statistics = [x.new_empty(scale.shape, dtype=statistics_dtype(x.dtype)) for _ in range(4)]
    return x.new_empty(x.shape), *statistics


@served_op(
    "fused_batch_norm(str client, Tensor x, Tensor scale, Tensor offset, Tensor? mean, Tensor? variance, "
    "float epsilon, float exponential_avg_factor, str data_format, bool is_training) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    _batch_norm_fake,
)
def _batch_norm_op(
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


def _batch_norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    client, x, scale, _, mean, variance, ctx.epsilon, _, ctx.data_format, ctx.is_training = inputs
    _, *statistics, reserve_space_1, reserve_space_2 = output
    keep_client(ctx, client)
    ctx.mark_non_differentiable(*statistics, reserve_space_1, reserve_space_2)
    moments = (reserve_space_1, reserve_space_2) if ctx.is_training else (mean, variance)
    ctx.save_for_backward(x, scale, *moments)


def _batch_norm_backward(ctx: Any, dy: torch.Tensor, *_: Any) -> Any:
    gradients = _batch_norm_grad(ctx.client, dy, *ctx.saved_tensors, ctx.epsilon, ctx.data_format, ctx.is_training)
    return None, *gradients, *(None,) * 6


def _batch_norm_fake_grad(_client: str, _dy: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, *_: Any) -> Any:
    return x.new_empty(x.shape), scale.new_empty(scale.shape), scale.new_empty(scale.shape)


@served_op(
    "fused_batch_norm_grad(str client, Tensor dy, Tensor x, Tensor scale, Tensor reserve_space_1, "
    "Tensor reserve_space_2, float epsilon, str data_format, bool is_training) -> (Tensor, Tensor, Tensor)",
    _batch_norm_fake_grad,
)
def _batch_norm_grad_op(
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


def _batch_norm_setup_grad(ctx: Any, inputs: Any, _output: Any) -> None:
    _, dy, x, scale, mean, variance, ctx.epsilon, ctx.data_format, ctx.is_training = inputs
    ctx.save_for_backward(dy, x, scale, mean, variance)


def _batch_norm_backward_of_grad(ctx: Any, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
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


_batch_norm_grad = differentiable(_batch_norm_grad_op, _batch_norm_setup_grad, _batch_norm_backward_of_grad)
_batch_norm = differentiable(_batch_norm_op, _batch_norm_setup, _batch_norm_backward)


def layer_norm(
    client: Client, x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, *, epsilon: float = 1e-5
) -> torch.Tensor:
    """Normalises over the last dimensions, those of `scale`, as `RawOps.LayerNorm` and PyTorch's layer_norm do.

    One call of the server, and another one in the backward. Second derivatives are computed by PyTorch.

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
    name = checked_name(client, x=x, scale=scale, offset=offset)
    y: torch.Tensor = _layer_norm(name, x, scale, offset, plain(float, epsilon, "epsilon"))[0]
    return y


def _layer_norm_fake(_client: str, x: torch.Tensor, scale: torch.Tensor, _offset: torch.Tensor, _epsilon: float) -> Any:
    groups, dtype = x.shape[: x.dim() - scale.dim()], statistics_dtype(x.dtype)
    return x.new_empty(x.shape), x.new_empty(groups, dtype=dtype), x.new_empty(groups, dtype=dtype)


@served_op(
    "layer_norm(str client, Tensor x, Tensor scale, Tensor offset, float epsilon) -> (Tensor, Tensor, Tensor)",
    _layer_norm_fake,
)
def _layer_norm_op(client: Client, x: Any, scale: Any, offset: Any, epsilon: float) -> Any:
    return client.raw_ops.LayerNorm(x=x, scale=scale, offset=offset, epsilon=epsilon)


def _layer_norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    client, x, scale, _, ctx.epsilon = inputs
    _, mean, rstd = output
    keep_client(ctx, client)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, scale, mean, rstd)


def _layer_norm_backward(ctx: Any, dy: torch.Tensor, *_: Any) -> Any:
    return None, *_layer_norm_grad(ctx.client, dy, *ctx.saved_tensors, ctx.epsilon), None


def _layer_norm_fake_grad(_client: str, _dy: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, *_: Any) -> Any:
    return x.new_empty(x.shape), scale.new_empty(scale.shape), scale.new_empty(scale.shape)


@served_op(
    "layer_norm_grad(str client, Tensor dy, Tensor x, Tensor scale, Tensor mean, Tensor rstd, float epsilon) -> "
    "(Tensor, Tensor, Tensor)",
    _layer_norm_fake_grad,
)
def _layer_norm_grad_op(client: Client, dy: Any, x: Any, scale: Any, mean: Any, rstd: Any, _epsilon: float) -> Any:
    return client.raw_ops.LayerNormGrad(y_backprop=dy, x=x, scale=scale, mean=mean, rstd=rstd)


def _layer_norm_setup_grad(ctx: Any, inputs: Any, _output: Any) -> None:
    _, dy, x, scale, _, _, ctx.epsilon = inputs
    ctx.save_for_backward(dy, x, scale)


def _layer_norm_backward_of_grad(ctx: Any, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    dy, x, scale = ctx.saved_tensors
    groups = (1,) * (x.dim() - scale.dim())
    axes = tuple(range(x.dim() - scale.dim(), x.dim()))
    inner = second_derivative(
        (v, a.reshape(groups + a.shape), b.reshape(groups + b.shape)),
        dy,
        x,
        scale.reshape(groups + scale.shape),
        axes=axes,
        epsilon=ctx.epsilon,
    )
    return None, inner.dy, inner.x, inner.scale.reshape(scale.shape), None, None, None


_layer_norm_grad = differentiable(_layer_norm_grad_op, _layer_norm_setup_grad, _layer_norm_backward_of_grad)
_layer_norm = differentiable(_layer_norm_op, _layer_norm_setup, _layer_norm_backward)


class Gradients(NamedTuple):
    """The gradients with respect to the inputs of a normalization's gradient: each of the dtype of its input."""

    dy: torch.Tensor
    x: torch.Tensor
    scale: torch.Tensor


def second_derivative(
    outer: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dy: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    *,
    axes: tuple[int, ...],
    epsilon: float,
    moments: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Gradients:
    """Returns the gradients of <v, dx> + <a, d_scale> + <b, d_offset>, where dx, d_scale and d_offset are those of y.

        y = xhat scale + offset, xhat = (x - mean) r, r = 1 / sqrt(variance + epsilon)

    With P(g) = r (g - mean(g) - xhat mean(g xhat)), which is its own transpose:

        dx = P(dy scale), d_scale = sum(dy xhat), d_offset = sum(dy)

    It computes in float32, or float64 for float64, from x alone, so that it can be differentiated again.

    Args:
        outer: (v, a, b).
        dy: The gradient with respect to y, of the shape of x.
        x: The input.
        scale: The scale, in a shape that broadcasts with x; a and b have that shape, too.
        axes: The dimensions over which the moments are taken.
        epsilon: Added to the variance.
        moments: The mean and the variance, if they are constants; in a shape that broadcasts with x.
    """
    dtype, scale_dims = x.dtype, tuple(index for index in range(x.dim()) if _is_summed(scale, x, index))
    wide = scale.dtype
    images, output_gradient = x.to(wide), dy.to(wide)
    v, a, b = (each.to(wide) for each in outer)
    if moments is None:
        mean = images.mean(axes, keepdim=True)
        r = (images.var(axes, correction=0, keepdim=True) + epsilon).rsqrt()
    else:
        mean, r = moments[0], (moments[1] + epsilon).rsqrt()
    xhat = (images - mean) * r

    def mean_of(values: torch.Tensor) -> torch.Tensor:
        return values.mean(axes, keepdim=True)

    def projected(gradient: torch.Tensor) -> torch.Tensor:
        if moments is not None:
            return r * gradient
        return r * (gradient - mean_of(gradient) - xhat * mean_of(gradient * xhat))

    g, pv = output_gradient * scale, projected(v)
    of_x = projected(a * output_gradient)
    if moments is None:
        m, n = mean_of(g * xhat), mean_of(v * xhat)
        spread = mean_of(v * g) - mean_of(v) * mean_of(g) - m * n
        of_x = of_x - projected(r * (n * g + m * v)) - r * r * xhat * spread
    of_scale = (output_gradient * pv).sum(scale_dims, keepdim=True) if scale_dims else output_gradient * pv
    return Gradients((scale * pv + a * xhat + b).to(dtype), of_x.to(dtype), of_scale)


def _is_summed(scale: torch.Tensor, x: torch.Tensor, index: int) -> bool:
    """Returns True if the scale has one element in a dimension of x."""
    return bool(scale.shape[index] == 1 and x.shape[index] != 1)
