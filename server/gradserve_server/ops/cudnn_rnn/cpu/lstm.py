"""The steps of an LSTM after their products; see `kernels` for the arguments."""

from typing import Any

from numba.extending import register_jitable

from gradserve_server.devices.host.activations import hyperbolic_tangent, one_like, sigmoid
from gradserve_server.devices.host.intrinsics import load, store_at
from gradserve_server.ops.cudnn_rnn.cpu.products import products_with_columns


def lstm_forward(
    begin: Any,
    count: Any,
    first_row: Any,
    end_row: Any,
    reverse: Any,
    steps: Any,
    units: Any,
    lengths: Any,
    recurrent: Any,
    bias: Any,
    gates: Any,
    cells: Any,
    outputs: Any,
    stride: Any,
    offset: Any,
) -> None:
    """Computes c_t = f c_(t-1) + i c~ and h_t = o tanh(c_t)."""
    batch = len(lengths)
    for step in range(begin, begin + count):
        time = steps - 1 - step if reverse else step
        cell, cell_before = (time, time + 1) if reverse else (time + 1, time)
        for row in range(first_row, end_row):
            if time < lengths[row]:
                forward_row(
                    0,
                    units,
                    units,
                    recurrent,
                    row * 4 * units,
                    bias,
                    gates,
                    (time * batch + row) * 4 * units,
                    cells,
                    (cell * batch + row) * units,
                    (cell_before * batch + row) * units,
                    outputs,
                    ((time + 1) * batch + row) * stride + offset,
                )


def lstm_backward(
    begin: Any,
    count: Any,
    first_row: Any,
    end_row: Any,
    own_products: Any,
    reverse: Any,
    steps: Any,
    units: Any,
    lengths: Any,
    weights: Any,
    gates: Any,
    cells: Any,
    d_outputs: Any,
    stride: Any,
    offset: Any,
    incoming: Any,
    d_cells: Any,
    d_gates: Any,
) -> None:
    """Computes the gradients with respect to the arguments of the gates' functions."""
    batch, size = len(lengths), 4 * units
    for step in range(begin, begin + count):
        time = step if reverse else steps - 1 - step
        cell, cell_before = (time, time + 1) if reverse else (time + 1, time)
        if own_products and step > 0:
            position = (time - 1 if reverse else time + 1) * batch * size
            products_with_columns(weights, size, units, batch, d_gates, position, size, incoming)
        for row in range(first_row, end_row):
            d_gates_row = (time * batch + row) * size
            if time >= lengths[row]:
                d_gates[d_gates_row : d_gates_row + size] = 0
                continue
            is_last = time == (0 if reverse else lengths[row] - 1)
            _backward_row(
                units,
                gates,
                d_gates,
                d_gates_row,
                cells,
                (cell * batch + row) * units,
                (cell_before * batch + row) * units,
                d_outputs,
                (time * batch + row) * stride + offset,
                incoming,
                ((batch if is_last else 0) + row) * units,
                d_cells,
                row * units,
            )


@register_jitable(fastmath={"contract"})
def forward_row(
    first: Any,
    end: Any,
    units: Any,
    recurrent: Any,
    recurrent_row: Any,
    bias: Any,
    gates: Any,
    gates_row: Any,
    cells: Any,
    cell_row: Any,
    cell_before_row: Any,
    outputs: Any,
    output_row: Any,
) -> None:
    """Computes the units from `first` to `end` of a sequence's step."""
    for unit in range(first, end):
        at, other = gates_row + unit, recurrent_row + unit
        i = sigmoid(load(gates, at) + load(recurrent, other) + load(bias, unit))
        at, other = at + units, other + units
        f = sigmoid(load(gates, at) + load(recurrent, other) + load(bias, units + unit))
        at, other = at + units, other + units
        n = hyperbolic_tangent(load(gates, at) + load(recurrent, other) + load(bias, 2 * units + unit))
        at, other = at + units, other + units
        o = sigmoid(load(gates, at) + load(recurrent, other) + load(bias, 3 * units + unit))
        c = f * load(cells, cell_before_row + unit) + i * n
        store_at(0, gates, gates_row + unit, i)
        store_at(1, gates, gates_row + units + unit, f)
        store_at(2, gates, gates_row + 2 * units + unit, n)
        store_at(3, gates, gates_row + 3 * units + unit, o)
        store_at(4, cells, cell_row + unit, c)
        store_at(5, outputs, output_row + unit, o * hyperbolic_tangent(c))


@register_jitable(fastmath={"contract"})
def _backward_row(
    units: Any,
    gates: Any,
    d_gates: Any,
    gates_row: Any,
    cells: Any,
    cell_row: Any,
    cell_before_row: Any,
    d_outputs: Any,
    d_output_row: Any,
    incoming: Any,
    incoming_row: Any,
    d_cells: Any,
    d_cells_row: Any,
) -> None:
    for unit in range(units):
        at = gates_row + unit
        i, f = load(gates, at), load(gates, at + units)
        n, o = load(gates, at + 2 * units), load(gates, at + 3 * units)
        one = one_like(i)
        tanh_c = hyperbolic_tangent(load(cells, cell_row + unit))
        d = load(d_outputs, d_output_row + unit) + load(incoming, incoming_row + unit)
        d_c = load(d_cells, d_cells_row + unit) + d * o * (one - tanh_c * tanh_c)
        store_at(0, d_gates, at, d_c * n * i * (one - i))
        store_at(1, d_gates, at + units, d_c * load(cells, cell_before_row + unit) * f * (one - f))
        store_at(2, d_gates, at + 2 * units, d_c * i * (one - n * n))
        store_at(3, d_gates, at + 3 * units, d * tanh_c * o * (one - o))
        store_at(4, d_cells, d_cells_row + unit, d_c * f)
