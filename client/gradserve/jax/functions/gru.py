"""GRUBlockCell."""

from typing import Any

import jax
import jax.numpy as jnp

from gradserve.client import Client
from gradserve.jax.functions.served import Arrays, ServedOp, as_array, like

_INPUTS = ("x", "h_prev", "w_ru", "w_c", "b_ru", "b_c")


def gru_block_cell(client: Client, x: Any, h_prev: Any, w_ru: Any, w_c: Any, b_ru: Any, b_c: Any) -> jax.Array:
    """Computes one step of a GRU for a batch, as `RawOps.GRUBlockCell` does.

    One call of the server, and another one for the gradient. B is the batch, I the size of the input, H that of the
    cell; all arrays have the dtype of x: float16, bfloat16, float32 or float64. It can be in the body of a
    `jax.lax.scan`.

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
        InvalidArgumentError: An array has another shape or dtype. Inside `jax.jit`, a JaxRuntimeError that says so.
        GradserveError: See `RawOps.GRUBlockCell`; likewise.
    """
    x = jnp.asarray(x)
    inputs = (x, *(as_array(each, x.dtype) for each in (h_prev, w_ru, w_c, b_ru, b_c)))
    state = like(inputs[1])

    def forward(*inputs: Any) -> Arrays:
        r, u, c, h = client.raw_ops.GRUBlockCell(**dict(zip(_INPUTS, inputs, strict=True)))
        return h, r, u, c

    def backward(inputs: Any, results: Any, gradients: Any) -> Arrays:
        (_, r, u, c), (d_h,) = results, gradients
        computed = client.raw_ops.GRUBlockCellGrad(
            **dict(zip(_INPUTS, inputs, strict=True)), r=r, u=u, c=c, d_h=d_h, weight_gradients=True
        )
        return computed.d_x, computed.d_h_prev, computed.d_w_ru, computed.d_w_c, computed.d_b_ru, computed.d_b_c

    op = ServedOp(
        "gru_block_cell",
        forward,
        backward,
        results=(state, state, state, state),
        num_outputs=1,
        num_served=1,
        differentiable=_INPUTS,
    )
    (h,) = op(*inputs)
    return h
