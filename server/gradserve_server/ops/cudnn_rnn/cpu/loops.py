"""The kernels of CudnnRNN on the host; those of an lstm are in `lstm_loops`. Importing this imports Numba.

U is the dtype of the computation, float32 or float64. Arrays are flat; T, B, H, G, D and H' are as in `spec`. A kernel
does some steps of one pseudo-layer in the order of its direction, which is `reverse` for direction 1; the backward
kernels do the same steps in the opposite order. Sequences that have ended are not computed, and their gradients are 0.

All kernels take, in this order:

* begin, count: The steps to do, counted in the kernel's own order.
* first_row, end_row: The sequences to do; with own_products, all of them.
* own_products: Not for lstm_forward. Whether the kernel itself multiplies by the recurrent weights, which for few rows
  is faster than BLAS. Otherwise it does one step, whose products are computed already. Not with a projection.
* reverse: See above.
* steps: T.
* units: H.
* is_relu: Only for a network without gates.
* lengths: int64, [B].
* weights: Not for lstm_forward. R, U, [G, H, H]. Read with own_products.

The forward kernels continue with

* recurrent: U, [B, G, H]: the products of h_(t-1) and R. With own_products, scratch memory.
* bias: U, [G, H], the sum of both; for gru bW + bR of r and z, bW of n, bR of n.
* gates: U, [T, B, G, H]: the products of the input and W. For lstm and gru they are replaced by the gates.
* lstm: cells: U, [T + 1, B, H]; see `SavedDirection`.
* gru: candidates: U, [T, B, H]: a result, R_n h_(t-1) + bR_n.
* outputs: U, [T + 2, B, stride], where this direction has the H elements from `offset`; see `SavedLayer`.
* stride, offset: See outputs.

and the backward kernels with

* lstm and gru: gates: The result of the forward kernel.
* lstm: cells; gru: candidates: The results of the forward kernel.
* gru and networks without gates: outputs: The result of the forward kernel.
* d_outputs: U, [T, B, stride]: the gradients with respect to the outputs.
* stride, offset: See outputs.
* incoming: U, [2, B, H]: first the gradient from the step done before, which with own_products is scratch memory that
  starts as 0; then the gradient with respect to the final state.
* lstm: d_cells: U, [B, H]: at first the gradient with respect to the final c, in the end to the initial c.
* gru: carry: U, [B, H]: 0 at first; the part of the gradient with respect to h_(t-1) that does not pass through R.
* d_gates: U, [T, B, G, H]: a result, the gradients with respect to the arguments of the gates' functions. For gru
  [T, B, 4, H]: n, r, z, and the gradient with respect to R_n h_(t-1) + bR_n.
"""

from typing import Any

from numba.extending import register_jitable

from gradserve_server.devices.host.activations import hyperbolic_tangent, one_like, sigmoid
from gradserve_server.devices.host.intrinsics import load, store, store_at


def gru_forward(
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
    recurrent: Any,
    bias: Any,
    gates: Any,
    candidates: Any,
    outputs: Any,
    stride: Any,
    offset: Any,
) -> None:
    """Computes h_t = (1 - z) n + z h_(t-1)."""
    batch = len(lengths)
    for step in range(begin, begin + count):
        time = steps - 1 - step if reverse else step
        before = time + 2 if reverse else time
        if own_products:
            position = before * batch * stride + offset
            products_with_rows(weights, 0, 3 * units, 3, units, batch, outputs, position, stride, recurrent)
        for row in range(first_row, end_row):
            if time < lengths[row]:
                _gru_forward_row(
                    units,
                    recurrent,
                    row * 3 * units,
                    bias,
                    gates,
                    (time * batch + row) * 3 * units,
                    candidates,
                    (time * batch + row) * units,
                    outputs,
                    ((time + 1) * batch + row) * stride + offset,
                    (before * batch + row) * stride + offset,
                )


def gru_backward(
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
    candidates: Any,
    outputs: Any,
    d_outputs: Any,
    stride: Any,
    offset: Any,
    incoming: Any,
    carry: Any,
    d_gates: Any,
) -> None:
    """Computes the gradients with respect to the arguments of the gates' functions."""
    batch = len(lengths)
    for step in range(begin, begin + count):
        time = step if reverse else steps - 1 - step
        before, after = (time + 2, time - 1) if reverse else (time, time + 1)
        if own_products and step > 0:
            position = after * batch * 4 * units + units
            products_with_columns(weights, 3 * units, units, batch, d_gates, position, 4 * units, incoming)
        for row in range(first_row, end_row):
            d_gates_row = (time * batch + row) * 4 * units
            if time >= lengths[row]:
                d_gates[d_gates_row : d_gates_row + 4 * units] = 0
                continue
            is_last = time == (0 if reverse else lengths[row] - 1)
            _gru_backward_row(
                units,
                gates,
                (time * batch + row) * 3 * units,
                candidates,
                (time * batch + row) * units,
                outputs,
                (before * batch + row) * stride + offset,
                d_outputs,
                (time * batch + row) * stride + offset,
                incoming,
                ((batch if is_last else 0) + row) * units,
                carry,
                row * units,
                d_gates,
                d_gates_row,
            )


def vanilla_forward(
    begin: Any,
    count: Any,
    first_row: Any,
    end_row: Any,
    own_products: Any,
    reverse: Any,
    steps: Any,
    units: Any,
    is_relu: Any,
    lengths: Any,
    weights: Any,
    recurrent: Any,
    bias: Any,
    gates: Any,
    outputs: Any,
    stride: Any,
    offset: Any,
) -> None:
    """Computes h_t, the relu or tanh of the one "gate"."""
    batch = len(lengths)
    for step in range(begin, begin + count):
        time = steps - 1 - step if reverse else step
        before = time + 2 if reverse else time
        if own_products:
            position = before * batch * stride + offset
            products_with_rows(weights, 0, units, 1, units, batch, outputs, position, stride, recurrent)
        for row in range(first_row, end_row):
            if time < lengths[row]:
                gates_row = (time * batch + row) * units
                output_row = ((time + 1) * batch + row) * stride + offset
                if is_relu:
                    _relu_row(units, recurrent, row * units, bias, gates, gates_row, outputs, output_row)
                else:
                    _tanh_row(units, recurrent, row * units, bias, gates, gates_row, outputs, output_row)


def vanilla_backward(
    begin: Any,
    count: Any,
    first_row: Any,
    end_row: Any,
    own_products: Any,
    reverse: Any,
    steps: Any,
    units: Any,
    is_relu: Any,
    lengths: Any,
    weights: Any,
    outputs: Any,
    d_outputs: Any,
    stride: Any,
    offset: Any,
    incoming: Any,
    d_gates: Any,
) -> None:
    """Computes the gradients with respect to the argument of relu or tanh."""
    batch = len(lengths)
    for step in range(begin, begin + count):
        time = step if reverse else steps - 1 - step
        after = time - 1 if reverse else time + 1
        if own_products and step > 0:
            position = after * batch * units
            products_with_columns(weights, units, units, batch, d_gates, position, units, incoming)
        for row in range(first_row, end_row):
            d_gates_row = (time * batch + row) * units
            if time >= lengths[row]:
                d_gates[d_gates_row : d_gates_row + units] = 0
                continue
            is_last = time == (0 if reverse else lengths[row] - 1)
            incoming_row = ((batch if is_last else 0) + row) * units
            output_row = ((time + 1) * batch + row) * stride + offset
            d_output_row = (time * batch + row) * stride + offset
            for unit in range(units):
                h = load(outputs, output_row + unit)
                d = load(d_outputs, d_output_row + unit) + load(incoming, incoming_row + unit)
                one = one_like(h)
                d_relu = d if h > 0 else one - one
                store(d_gates, d_gates_row + unit, d_relu if is_relu else d * (one - h * h))


@register_jitable(fastmath={"contract", "reassoc"})
def products_with_rows(
    weights: Any,
    first: Any,
    end: Any,
    num_gates: Any,
    units: Any,
    batch: Any,
    x: Any,
    position: Any,
    stride: Any,
    y: Any,
) -> None:
    """Computes y = x R^T for some rows of R, each a unit of a gate.

    Args:
        weights: R, flat [gates, units, units].
        first: The first row of R.
        end: The row after the last.
        num_gates: G.
        units: H.
        batch: B.
        x: Flat; rows of H elements, the first at `position`, and the others at distances of `stride`.
        position: See x.
        stride: See x.
        y: Flat [B, gates, units].
    """
    zero = y.dtype.type(0)
    size = num_gates * units
    unit = first
    while unit + 4 <= end:
        w = unit * units
        for row in range(batch):
            start = position + row * stride
            own = x[start : start + units]
            a, b, c, d = zero, zero, zero, zero
            for k in range(len(own)):
                value = own[k]
                a += load(weights, w + k) * value
                b += load(weights, w + units + k) * value
                c += load(weights, w + 2 * units + k) * value
                d += load(weights, w + 3 * units + k) * value
            to = row * size + unit
            y[to], y[to + 1], y[to + 2], y[to + 3] = a, b, c, d
        unit += 4
    while unit < end:
        for row in range(batch):
            start = position + row * stride
            own = x[start : start + units]
            a = zero
            for k in range(len(own)):
                a += load(weights, unit * units + k) * own[k]
            y[row * size + unit] = a
        unit += 1


@register_jitable(fastmath={"contract"})
def products_with_columns(
    weights: Any,
    rows: Any,
    units: Any,
    batch: Any,
    x: Any,
    position: Any,
    stride: Any,
    y: Any,
) -> None:
    """Computes y = x R.

    Args:
        weights: R, flat [rows, units].
        rows: The number of rows of R.
        units: H.
        batch: B.
        x: Flat; rows of `rows` elements, the first at `position`, and the others at distances of `stride`.
        position: See x.
        stride: See x.
        y: Flat [B, units].
    """
    for row in range(batch):
        y[row * units : (row + 1) * units] = 0
    k = 0
    while k + 8 <= rows:
        w = k * units
        for row in range(batch):
            at = position + row * stride + k
            a, b, c, d = x[at], x[at + 1], x[at + 2], x[at + 3]
            e, f, g, h = x[at + 4], x[at + 5], x[at + 6], x[at + 7]
            sums = y[row * units : (row + 1) * units]
            for column in range(len(sums)):
                at = w + column
                total = sums[column] + a * load(weights, at)
                other = b * load(weights, at + units)
                total += c * load(weights, at + 2 * units)
                other += d * load(weights, at + 3 * units)
                total += e * load(weights, at + 4 * units)
                other += f * load(weights, at + 5 * units)
                total += g * load(weights, at + 6 * units)
                other += h * load(weights, at + 7 * units)
                store(sums, column, total + other)
        k += 8
    while k < rows:
        for row in range(batch):
            a = x[position + row * stride + k]
            sums = y[row * units : (row + 1) * units]
            for column in range(len(sums)):
                store(sums, column, sums[column] + a * load(weights, k * units + column))
        k += 1


@register_jitable(fastmath={"contract"})
def _gru_forward_row(
    units: Any,
    recurrent: Any,
    recurrent_row: Any,
    bias: Any,
    gates: Any,
    gates_row: Any,
    candidates: Any,
    candidates_row: Any,
    outputs: Any,
    output_row: Any,
    output_before_row: Any,
) -> None:
    for unit in range(units):
        at, other = gates_row + unit, recurrent_row + unit
        r = sigmoid(load(gates, at) + load(recurrent, other) + load(bias, unit))
        at, other = at + units, other + units
        z = sigmoid(load(gates, at) + load(recurrent, other) + load(bias, units + unit))
        at, other = at + units, other + units
        q = load(recurrent, other) + load(bias, 3 * units + unit)
        n = hyperbolic_tangent(load(gates, at) + load(bias, 2 * units + unit) + r * q)
        h = load(outputs, output_before_row + unit)
        store_at(0, gates, gates_row + unit, r)
        store_at(1, gates, gates_row + units + unit, z)
        store_at(2, gates, gates_row + 2 * units + unit, n)
        store_at(3, candidates, candidates_row + unit, q)
        store_at(4, outputs, output_row + unit, n + z * (h - n))


@register_jitable(fastmath={"contract"})
def _gru_backward_row(
    units: Any,
    gates: Any,
    gates_row: Any,
    candidates: Any,
    candidates_row: Any,
    outputs: Any,
    output_before_row: Any,
    d_outputs: Any,
    d_output_row: Any,
    incoming: Any,
    incoming_row: Any,
    carry: Any,
    carry_row: Any,
    d_gates: Any,
    d_gates_row: Any,
) -> None:
    for unit in range(units):
        at = gates_row + unit
        r, z, n = load(gates, at), load(gates, at + units), load(gates, at + 2 * units)
        one = one_like(r)
        d = load(d_outputs, d_output_row + unit) + load(incoming, incoming_row + unit) + load(carry, carry_row + unit)
        d_n = d * (one - z) * (one - n * n)
        d_r = d_n * load(candidates, candidates_row + unit) * r * (one - r)
        d_z = d * (load(outputs, output_before_row + unit) - n) * z * (one - z)
        at = d_gates_row + unit
        store_at(0, d_gates, at, d_n)
        store_at(1, d_gates, at + units, d_r)
        store_at(2, d_gates, at + 2 * units, d_z)
        store_at(3, d_gates, at + 3 * units, d_n * r)
        store_at(4, carry, carry_row + unit, d * z)


@register_jitable(fastmath={"contract"})
def _relu_row(
    units: Any,
    recurrent: Any,
    recurrent_row: Any,
    bias: Any,
    gates: Any,
    gates_row: Any,
    outputs: Any,
    output_row: Any,
) -> None:
    for unit in range(units):
        a = load(gates, gates_row + unit) + load(recurrent, recurrent_row + unit) + load(bias, unit)
        one = one_like(a)
        store(outputs, output_row + unit, one - one if a < 0 else a)


@register_jitable(fastmath={"contract"})
def _tanh_row(
    units: Any,
    recurrent: Any,
    recurrent_row: Any,
    bias: Any,
    gates: Any,
    gates_row: Any,
    outputs: Any,
    output_row: Any,
) -> None:
    for unit in range(units):
        a = load(gates, gates_row + unit) + load(recurrent, recurrent_row + unit) + load(bias, unit)
        store(outputs, output_row + unit, hyperbolic_tangent(a))
