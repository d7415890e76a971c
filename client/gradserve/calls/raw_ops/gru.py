"""GRUBlockCell and its gradient."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gradserve.calls.exchange import Operation
from gradserve.calls.op_wire import as_op_input, run_op
from gradserve.op_outputs import GRUBlockCellAllGradOutputs, GRUBlockCellGradOutputs, GRUBlockCellOutputs
from gradserve.results import Tensor, TensorHandle, TensorLike
from gradserve.v1 import gru_block_cell_messages_pb2 as messages_pb2
from gradserve.wire.payload import Array


class GRUCalls:
    """GRUBlockCell and its gradient."""

    def GRUBlockCell(
        self,
        *,
        x: TensorLike,
        h_prev: TensorLike,
        w_ru: TensorLike,
        w_c: TensorLike,
        b_ru: TensorLike,
        b_c: TensorLike,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[GRUBlockCellOutputs[Tensor]]:
        """Computes one step of a GRU for a batch.

            [r, u] = sigmoid([x, h_prev] . w_ru + b_ru)
            c      = tanh([x, h_prev r] . w_c + b_c)
            h      = u h_prev + (1 - u) c

        In the following, B is the batch, I the size of the input, H that of the cell, and T the dtype of x, which all
        tensors have: float16, bfloat16, float32 or float64.

        Args:
            x: T, shape [B, I].
            h_prev: T, shape [B, H]: the state before.
            w_ru: T, shape [I + H, 2H]: rows for x, then for h_prev; columns for r, then for u.
            w_c: T, shape [I + H, H]: rows as in w_ru.
            b_ru: T, shape [2H]: for r, then for u.
            b_c: T, shape [H].
            keep: Leave the outputs on the server and return their handles.
            lease: For how many seconds they live there without use; None for the server's default.

        Returns:
            r: T, shape [B, H]: the reset gate.
            u: T, shape [B, H]: the update gate.
            c: T, shape [B, H]: the candidate state.
            h: T, shape [B, H]: the new state.

        Raises:
            InvalidArgumentError: An argument does not fit; its `field` says which.
            NotFoundError: A handle does not exist (any more).
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
        inputs = _inputs(x, h_prev=h_prev, w_ru=w_ru, w_c=w_c, b_ru=b_ru, b_c=b_c)
        request = messages_pb2.GRUBlockCellRequest
        return GRUBlockCellOutputs(**(yield from run_op("GRUBlockCell", request, inputs, {}, keep=keep, lease=lease)))

    def GRUBlockCellGrad(
        self,
        *,
        x: TensorLike,
        h_prev: TensorLike,
        w_ru: TensorLike,
        w_c: TensorLike,
        b_ru: TensorLike,
        b_c: TensorLike,
        r: TensorLike,
        u: TensorLike,
        c: TensorLike,
        d_h: TensorLike,
        weight_gradients: bool = False,
        keep: bool = False,
        lease: float | None = None,
    ) -> Operation[GRUBlockCellGradOutputs[Tensor] | GRUBlockCellAllGradOutputs[Tensor]]:
        """Gradients of GRUBlockCell.

        B, I, H and T are those of `GRUBlockCell`.

        Args:
            x: As in the forward call.
            h_prev: As in the forward call.
            w_ru: As in the forward call.
            w_c: As in the forward call.
            b_ru: As in the forward call; only its shape counts.
            b_c: As in the forward call; only its shape counts.
            r: T, shape [B, H]: output of the forward call.
            u: T, shape [B, H]: output of the forward call.
            c: T, shape [B, H]: output of the forward call.
            d_h: T, shape [B, H]: the gradient with respect to h.
            weight_gradients: Compute the last four outputs too. TensorFlow's op does not have them.
            keep: Leave the outputs on the server and return their handles.
            lease: For how many seconds they live there without use; None for the server's default.

        Returns:
            d_x: T, shape [B, I].
            d_h_prev: T, shape [B, H].
            d_c_bar: T, shape [B, H]: with respect to what tanh is taken of.
            d_r_bar_u_bar: T, shape [B, 2H]: with respect to what the sigmoid is taken of.
            d_w_ru: T, shape [I + H, 2H].
            d_w_c: T, shape [I + H, H].
            d_b_ru: T, shape [2H].
            d_b_c: T, shape [H].

        Raises:
            InvalidArgumentError: An argument does not fit; its `field` says which.
            NotFoundError: A handle does not exist (any more).
            ResourceExhaustedError: The outputs do not fit into the server's memory.
        """
        inputs = _inputs(x, h_prev=h_prev, w_ru=w_ru, w_c=w_c, b_ru=b_ru, b_c=b_c, r=r, u=u, c=c, d_h=d_h)
        request, attributes = messages_pb2.GRUBlockCellGradRequest, {"weight_gradients": weight_gradients}
        outputs = yield from run_op("GRUBlockCellGrad", request, inputs, attributes, keep=keep, lease=lease)
        return GRUBlockCellAllGradOutputs(**outputs) if weight_gradients else GRUBlockCellGradOutputs(**outputs)


def _inputs(x: TensorLike, **others: TensorLike) -> Mapping[str, Array | TensorHandle]:
    first = as_op_input(x, np.dtype(np.float32), "x")
    return {"x": first} | {name: as_op_input(value, first.dtype, name) for name, value in others.items()}
