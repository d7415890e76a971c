"""The steps of a network without gates; see `kernels` for the arguments."""

from typing import Any

from numba.extending import register_jitable

from gradserve_server.devices.host.activations import hyperbolic_tangent, one_like
from gradserve_server.devices.host.intrinsics import load, store
from gradserve_server.ops.cudnn_rnn.cpu.products import products_with_columns, products_with_rows


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
