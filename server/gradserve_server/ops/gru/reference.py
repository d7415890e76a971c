"""The mathematics of GRUBlockCell, over NumPy or CuPy.

The kernels are compared with it. The formulas are those of TensorFlow's kernels (`gru_ops.cc`), after Cho et al.,
"Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine Translation", 2014. If T has 16 bits,
the computation is in float32, else in T, and the result is rounded to T at the end; sums over the batch are in float64.
A dot is the product of matrices.
"""

from dataclasses import fields
from typing import Any

from gradserve_server.ops.activation.reference import sigmoid
from gradserve_server.ops.gru.spec import (
    CellInputs,
    CellOutputs,
    GradAttributes,
    GradInputs,
    GradOutputs,
    Sizes,
)
from gradserve_server.tensors.spec import FLOAT64, widened


def gru_block_cell(xp: Any, inputs: CellInputs, sizes: Sizes) -> CellOutputs:
    """Computes one step of a GRU.

    [r, u] = sigmoid([x, h_prev] . w_ru + b_ru)
    c      = tanh([x, h_prev r] . w_c + b_c)
    h      = u h_prev + (1 - u) c
    """
    x, h_prev, w_ru, w_c, b_ru, b_c = _widened(inputs)
    r, u = _halves(sigmoid(xp, xp.concatenate((x, h_prev), axis=1) @ w_ru + b_ru), sizes)
    c = xp.tanh(xp.concatenate((x, h_prev * r), axis=1) @ w_c + b_c)
    h = u * (h_prev - c) + c
    return CellOutputs(*(output.astype(inputs.x.dtype) for output in (r, u, c, h)))


def gru_block_cell_grad(xp: Any, inputs: GradInputs, attributes: GradAttributes, sizes: Sizes) -> GradOutputs:
    """Computes the gradients of GRUBlockCell, for given r, u and c.

    d_c_bar       = d_h (1 - u) (1 - c^2)
    d_u_bar       = d_h (h_prev - c) u (1 - u)
    [dx_2, d_hr]  = d_c_bar . w_c^T
    d_r_bar       = d_hr h_prev r (1 - r)
    d_r_bar_u_bar = [d_r_bar, d_u_bar]
    [dx_1, dh_1]  = d_r_bar_u_bar . w_ru^T
    d_x           = dx_1 + dx_2
    d_h_prev      = dh_1 + d_hr r + d_h u

    and with `weight_gradients`

    d_w_ru = [x, h_prev]^T . d_r_bar_u_bar
    d_w_c  = [x, h_prev r]^T . d_c_bar
    d_b_ru, d_b_c = the sums of d_r_bar_u_bar and d_c_bar over the batch
    """
    x, h_prev, w_ru, w_c, _, _, r, u, c, d_h = _widened(inputs)
    d_c_bar = d_h * (1 - u) * (1 - c * c)
    d_u_bar = d_h * (h_prev - c) * u * (1 - u)
    d_x_h_prevr = d_c_bar @ w_c.T
    d_hr = d_x_h_prevr[:, sizes.inputs :]
    d_r_bar = d_hr * h_prev * r * (1 - r)
    d_r_bar_u_bar = xp.concatenate((d_r_bar, d_u_bar), axis=1)
    d_x_h_prev = d_r_bar_u_bar @ w_ru.T
    outputs = [
        d_x_h_prev[:, : sizes.inputs] + d_x_h_prevr[:, : sizes.inputs],
        d_x_h_prev[:, sizes.inputs :] + d_hr * r + d_h * u,
        d_c_bar,
        d_r_bar_u_bar,
    ]
    if attributes.weight_gradients:
        outputs += [
            _wide(xp.concatenate((x, h_prev), axis=1)).T @ _wide(d_r_bar_u_bar),
            _wide(xp.concatenate((x, h_prev * r), axis=1)).T @ _wide(d_c_bar),
            _wide(d_r_bar_u_bar).sum(axis=0),
            _wide(d_c_bar).sum(axis=0),
        ]
    return GradOutputs(*(output.astype(inputs.x.dtype) for output in outputs))


def _wide(array: Any) -> Any:
    return array.astype(FLOAT64, copy=False)


def _widened(inputs: CellInputs) -> list[Any]:
    dtype = widened(inputs.x.dtype)
    return [getattr(inputs, field.name).astype(dtype) for field in fields(inputs)]


def _halves(columns: Any, sizes: Sizes) -> tuple[Any, Any]:
    return columns[:, : sizes.cells], columns[:, sizes.cells :]
