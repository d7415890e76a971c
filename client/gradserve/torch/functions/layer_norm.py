"""LayerNorm."""

from typing import Any

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


def _fake(_client: str, x: torch.Tensor, scale: torch.Tensor, _offset: torch.Tensor, _epsilon: float) -> Any:
    groups, dtype = x.shape[: x.dim() - scale.dim()], statistics_dtype(x.dtype)
    return x.new_empty(x.shape), x.new_empty(groups, dtype=dtype), x.new_empty(groups, dtype=dtype)


@served_op(
    "layer_norm(str client, Tensor x, Tensor scale, Tensor offset, float epsilon) -> (Tensor, Tensor, Tensor)", _fake
)
def _op(client: Client, x: Any, scale: Any, offset: Any, epsilon: float) -> Any:
    return client.raw_ops.LayerNorm(x=x, scale=scale, offset=offset, epsilon=epsilon)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    client, x, scale, _, ctx.epsilon = inputs
    _, mean, rstd = output
    keep_client(ctx, client)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, scale, mean, rstd)


def _backward(ctx: Any, dy: torch.Tensor, *_: Any) -> Any:
    return None, *_layer_norm_grad(ctx.client, dy, *ctx.saved_tensors, ctx.epsilon), None


def _fake_grad(_client: str, _dy: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, *_: Any) -> Any:
    return x.new_empty(x.shape), scale.new_empty(scale.shape), scale.new_empty(scale.shape)


@served_op(
    "layer_norm_grad(str client, Tensor dy, Tensor x, Tensor scale, Tensor mean, Tensor rstd, float epsilon) -> "
    "(Tensor, Tensor, Tensor)",
    _fake_grad,
)
def _grad_op(client: Client, dy: Any, x: Any, scale: Any, mean: Any, rstd: Any, _epsilon: float) -> Any:
    return client.raw_ops.LayerNormGrad(y_backprop=dy, x=x, scale=scale, mean=mean, rstd=rstd)


def _setup_grad(ctx: Any, inputs: Any, _output: Any) -> None:
    _, dy, x, scale, _, _, ctx.epsilon = inputs
    ctx.save_for_backward(dy, x, scale)


def _backward_of_grad(ctx: Any, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
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


_layer_norm_grad = differentiable(_grad_op, _setup_grad, _backward_of_grad)
_layer_norm = differentiable(_op, _setup, _backward)
