"""The kernels of an lstm, with the arguments that `loops` names. Importing this imports Numba.

The scans of an lstm do all steps of a few sequences with their products, on several threads. Every step is cut into the
same parts, each a range of units, whatever the number of threads. A thread that finds all parts of a step taken waits
for them, because the next step needs all of h, or all gradients. That takes a fraction of a microsecond, as the others
are at work on them. Instead of the first four or five arguments, scans take

* part_units: The units of each part of a step.
* taken: int64, [T, parts]: zeros, to count the threads that wanted to do each part; the first one does it.

then all others from `reverse` on, weights included, and counters; see `ChunkedKernels`. The backward scan takes `begin`
and `count` first. Its part_units is a multiple of 16, and two arrays differ, so that a part reads consecutive memory:

* weights: U, [parts, 4 H, part_units]: the columns of R for the units of each part, filled up with zeros.
* incoming: U, [2, B, parts * part_units].
"""

from typing import Any

from numba.extending import register_jitable

from gradserve_server.devices.host.activations import INLINED, hyperbolic_tangent, one_like, sigmoid
from gradserve_server.devices.host.intrinsics import DONE, count_up, load, store_at, wait_for
from gradserve_server.devices.host.lanes import in_all_lanes, load_lanes, num_lanes, write_lanes
from gradserve_server.ops.cudnn_rnn.cpu.loops import products_with_columns, products_with_rows

_THREADS = 1
"""The index of the counter of threads that take part."""


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
                _lstm_forward_row(
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


def lstm_scan_forward(
    part_units: Any,
    taken: Any,
    reverse: Any,
    steps: Any,
    units: Any,
    lengths: Any,
    weights: Any,
    recurrent: Any,
    bias: Any,
    gates: Any,
    cells: Any,
    outputs: Any,
    stride: Any,
    offset: Any,
    counters: Any,
) -> None:
    """Computes c_t = f c_(t-1) + i c~ and h_t = o tanh(c_t)."""
    batch, num_parts = len(lengths), -(-units // part_units)
    first_part = _first_part(counters, num_parts)
    for step in range(steps):
        time = steps - 1 - step if reverse else step
        cell, cell_before = (time, time + 1) if reverse else (time + 1, time)
        position = (time + 2 if reverse else time) * batch * stride + offset
        for index in range(num_parts):
            part = (first_part + index) % num_parts
            if count_up(taken, step * num_parts + part) > 0:
                continue
            first, end = part * part_units, min((part + 1) * part_units, units)
            for gate in range(4):
                row, end_row = gate * units + first, gate * units + end
                products_with_rows(weights, row, end_row, 4, units, batch, outputs, position, stride, recurrent)
            for row in range(batch):
                if time < lengths[row]:
                    _lstm_forward_row(
                        first,
                        end,
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
            count_up(counters, DONE)
        wait_for(counters, DONE, (step + 1) * num_parts)


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
            _lstm_backward_row(
                0,
                units,
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


def lstm_scan_backward(
    begin: Any,
    count: Any,
    part_units: Any,
    taken: Any,
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
    counters: Any,
) -> None:
    """Computes the gradients with respect to the arguments of the gates' functions."""
    batch, num_parts, size = len(lengths), -(-units // part_units), 4 * units
    width = num_parts * part_units
    first_part = _first_part(counters, num_parts)
    for step in range(begin, begin + count):
        time = step if reverse else steps - 1 - step
        cell, cell_before = (time, time + 1) if reverse else (time + 1, time)
        position = (time - 1 if reverse else time + 1) * batch * size
        for index in range(num_parts):
            part = (first_part + index) % num_parts
            if count_up(taken, step * num_parts + part) > 0:
                continue
            first, end = part * part_units, min((part + 1) * part_units, units)
            for row in range(batch):
                if step > 0:
                    x, y = position + row * size, row * width + first
                    _products_of_part(weights, part * size * part_units, size, part_units, d_gates, x, incoming, y)
                d_gates_row = (time * batch + row) * size
                if time >= lengths[row]:
                    for gate in range(4):
                        at = d_gates_row + gate * units
                        d_gates[at + first : at + end] = 0
                    continue
                is_last = time == (0 if reverse else lengths[row] - 1)
                _lstm_backward_row(
                    first,
                    end,
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
                    ((batch if is_last else 0) + row) * width,
                    d_cells,
                    row * units,
                )
            count_up(counters, DONE)
        wait_for(counters, DONE, (step - begin + 1) * num_parts)


@register_jitable(fastmath={"contract"})
def _products_of_part(
    weights: Any, first: Any, rows: Any, columns: Any, x: Any, position: Any, y: Any, to: Any
) -> None:
    """Computes y = x R for some columns of R.

    Args:
        weights: Flat; [rows, columns] of them from `first` on.
        first: See weights.
        rows: A multiple of 4.
        columns: A multiple of 16.
        x: Flat; `rows` numbers from `position` on.
        position: See x.
        y: Flat; `columns` results from `to` on.
        to: See y.
    """
    lanes = num_lanes(weights)
    column = 0
    while column + 4 * lanes <= columns:
        a, b = in_all_lanes(y.dtype.type(0)), in_all_lanes(y.dtype.type(0))
        c, d = in_all_lanes(y.dtype.type(0)), in_all_lanes(y.dtype.type(0))
        for k in range(0, rows, 4):
            at = first + k * columns + column
            p, q = in_all_lanes(x[position + k]), in_all_lanes(x[position + k + 1])
            r, s = in_all_lanes(x[position + k + 2]), in_all_lanes(x[position + k + 3])
            a += _sum_of_four(weights, at, columns, p, q, r, s)
            b += _sum_of_four(weights, at + lanes, columns, p, q, r, s)
            c += _sum_of_four(weights, at + 2 * lanes, columns, p, q, r, s)
            d += _sum_of_four(weights, at + 3 * lanes, columns, p, q, r, s)
        write_lanes(y, to + column, a)
        write_lanes(y, to + column + lanes, b)
        write_lanes(y, to + column + 2 * lanes, c)
        write_lanes(y, to + column + 3 * lanes, d)
        column += 4 * lanes
    while column < columns:
        a = in_all_lanes(y.dtype.type(0))
        for k in range(0, rows, 4):
            p, q = in_all_lanes(x[position + k]), in_all_lanes(x[position + k + 1])
            r, s = in_all_lanes(x[position + k + 2]), in_all_lanes(x[position + k + 3])
            a += _sum_of_four(weights, first + k * columns + column, columns, p, q, r, s)
        write_lanes(y, to + column, a)
        column += lanes


@register_jitable(**INLINED)
def _sum_of_four(weights: Any, at: Any, columns: Any, p: Any, q: Any, r: Any, s: Any) -> Any:
    """Returns the sum of four rows' products for as many columns as a vector has."""
    left = p * load_lanes(weights, at) + q * load_lanes(weights, at + columns)
    right = r * load_lanes(weights, at + 2 * columns) + s * load_lanes(weights, at + 3 * columns)
    return left + right


@register_jitable(fastmath={"contract"})
def _lstm_forward_row(
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
def _lstm_backward_row(
    first: Any,
    end: Any,
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
    """Computes the units from `first` to `end` of a sequence's step."""
    for unit in range(first, end):
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


@register_jitable
def _first_part(counters: Any, num_parts: Any) -> Any:
    """Returns the part of each step that this thread tries first, so that it finds its weights in its own cache."""
    return count_up(counters, _THREADS) * (num_parts // 2) % num_parts
