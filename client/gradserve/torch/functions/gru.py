"""GRUBlockCell."""

from typing import Any

import torch

from gradserve.client import Client
from gradserve.torch.functions.served import (
    checked_name,
    differentiable,
    keep_client,
    no_second_derivative,
    served_op,
)

_INPUTS = ("x", "h_prev", "w_ru", "w_c", "b_ru", "b_c")


def gru_block_cell(
    client: Client,
    x: torch.Tensor,
    h_prev: torch.Tensor,
    w_ru: torch.Tensor,
    w_c: torch.Tensor,
    b_ru: torch.Tensor,
    b_c: torch.Tensor,
) -> torch.Tensor:
    """Computes one step of a GRU for a batch, as `RawOps.GRUBlockCell` does.

    One call of the server, and another one in the backward, which has no derivative. B is the batch, I the size of the
    input, H that of the cell; all tensors have the dtype of x: float16, bfloat16, float32 or float64.

        [r, u] = sigmoid([x, h_prev] . w_ru + b_ru)
        c      = tanh([x, h_prev r] . w_c + b_c)
        h      = u h_prev + (1 - u) c

    Args:
        client: The client of the server that computes.
        x: Shape [B, I].
        h_prev: Shape [B, H]: the previous state.
        w_ru: Shape [I + H, 2H]: rows for x, then for h_prev; columns for r, then for u.
        w_c: Shape [I + H, H].
        b_ru: Shape [2H].
        b_c: Shape [H].

    Returns:
        h, the new state, shape [B, H].

    Raises:
        InvalidArgumentError: A tensor has another shape or dtype; or, in a backward, a gradient of a gradient is
            needed.
        GradserveError: See `RawOps.GRUBlockCell`.
    """
    name = checked_name(client, x=x, h_prev=h_prev, w_ru=w_ru, w_c=w_c, b_ru=b_ru, b_c=b_c)
    h: torch.Tensor = _gru(name, x, h_prev, w_ru, w_c, b_ru, b_c)[0]
    return h


def _fake(_client: str, _x: torch.Tensor, h_prev: torch.Tensor, *_: Any) -> Any:
    return tuple(h_prev.new_empty(h_prev.shape) for _ in range(4))


@served_op(
    "gru_block_cell(str client, Tensor x, Tensor h_prev, Tensor w_ru, Tensor w_c, Tensor b_ru, Tensor b_c) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _fake,
)
def _op(client: Client, *inputs: Any) -> Any:
    outputs = client.raw_ops.GRUBlockCell(**dict(zip(_INPUTS, inputs, strict=True)))
    return outputs.h, outputs.r, outputs.u, outputs.c


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    client, x, h_prev, w_ru, w_c, _, _ = inputs
    _, *gates = output
    keep_client(ctx, client)
    ctx.mark_non_differentiable(*gates)
    ctx.save_for_backward(x, h_prev, w_ru, w_c, *gates)


def _backward(ctx: Any, d_h: torch.Tensor, *_: Any) -> Any:
    return None, *_gru_grad(ctx.client, d_h, *ctx.saved_tensors)


def _fake_grad(_client: str, _d_h: torch.Tensor, *inputs: torch.Tensor) -> Any:
    biases = tuple(weights.new_empty(weights.shape[1:]) for weights in inputs[2:4])
    return *(each.new_empty(each.shape) for each in inputs[:4]), *biases


@served_op(
    "gru_block_cell_grad(str client, Tensor d_h, Tensor x, Tensor h_prev, Tensor w_ru, Tensor w_c, Tensor r, Tensor u, "
    "Tensor c) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_grad,
)
def _grad_op(client: Client, d_h: Any, x: Any, h_prev: Any, w_ru: Any, w_c: Any, r: Any, u: Any, c: Any) -> Any:
    computed = client.raw_ops.GRUBlockCellGrad(
        x=x,
        h_prev=h_prev,
        w_ru=w_ru,
        w_c=w_c,
        b_ru=w_ru.new_zeros(w_ru.shape[1:]),  # the gradient depends on the biases' shapes alone
        b_c=w_c.new_zeros(w_c.shape[1:]),
        r=r,
        u=u,
        c=c,
        d_h=d_h,
        weight_gradients=True,
    )
    return computed.d_x, computed.d_h_prev, computed.d_w_ru, computed.d_w_c, computed.d_b_ru, computed.d_b_c


def _setup_grad(_ctx: Any, _inputs: Any, _output: Any) -> None: ...


_gru_grad = differentiable(_grad_op, _setup_grad, no_second_derivative("gru_block_cell"))
_gru = differentiable(_op, _setup, _backward)
