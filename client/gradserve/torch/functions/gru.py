"""GRUBlockCell."""

from typing import Any

import torch

from gradserve.client import Client
from gradserve.torch.functions.served import Arrays, Computed, ServedOp

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

    One call of the server, and another one in the backward. B is the batch, I the size of the input, H that of the
    cell; all tensors have the dtype of x: float16, bfloat16, float32 or float64.

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
        InvalidArgumentError: A tensor has another shape or dtype.
        GradserveError: See `RawOps.GRUBlockCell`.
    """

    def forward(*inputs: Any) -> Computed:
        outputs = client.raw_ops.GRUBlockCell(**dict(zip(_INPUTS, inputs, strict=True)))
        return Computed((outputs.h,), (outputs.r, outputs.u, outputs.c))

    def backward(inputs: Any, _outputs: Any, gates: Any, gradients: Any) -> Arrays:
        r, u, c = gates
        computed = client.raw_ops.GRUBlockCellGrad(
            **dict(zip(_INPUTS, inputs, strict=True)), r=r, u=u, c=c, d_h=gradients[0], weight_gradients=True
        )
        return computed.d_x, computed.d_h_prev, computed.d_w_ru, computed.d_w_c, computed.d_b_ru, computed.d_b_c

    (h,) = ServedOp(forward, backward, 1)(x, h_prev, w_ru, w_c, b_ru, b_c)
    return h
