"""The steps of a GRU; see `kernels` for the arguments."""

from typing import Any

from numba.extending import register_jitable

from gradserve_server.devices.host.activations import hyperbolic_tangent, one_like, sigmoid
from gradserve_server.devices.host.intrinsics import load, store_at
from gradserve_server.ops.cudnn_rnn.cpu.products import products_with_columns, products_with_rows


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
                _forward_row(
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
            _backward_row(
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


@register_jitable(fastmath={"contract"})
def _forward_row(
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
def _backward_row(
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
