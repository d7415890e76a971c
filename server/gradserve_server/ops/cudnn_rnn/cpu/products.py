"""Products with the recurrent weights, for few rows. Importing this imports Numba.

See `kernels` for their use.
"""

from typing import Any

from numba.extending import register_jitable

from gradserve_server.devices.host.intrinsics import load, store


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
