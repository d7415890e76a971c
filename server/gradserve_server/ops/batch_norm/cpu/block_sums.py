"""Sums over a block of rows, in U. See `kernels`.

A block has at most BLOCK_ROWS rows, and every four of them are added up before they are added to the sum of their
column. So an element takes part in at most BLOCK_ROWS / 4 + 2 additions, in an order that does not depend on the width
of the processor's vectors. That bounds the error. Sums of blocks are added up in float64.
"""

from typing import Any

from numba.extending import register_jitable

from gradserve_server.devices.host.intrinsics import load, store
from gradserve_server.ops.batch_norm.cpu.formulas import normalized, relu_gradient

BLOCK_ROWS = 64


@register_jitable(fastmath={"contract"})
def sum_values(x: Any, first: Any, columns: Any, rows: Any, stride: Any, sums: Any) -> None:
    """Adds up x for each column.

    Args:
        x: T, flat.
        first: The index of the first element of the first row.
        columns: The number of elements of a row to add.
        rows: The number of rows, at most BLOCK_ROWS.
        stride: The distance from one row to the next.
        sums: U [columns]: the results are added to it.
    """
    num_quads = rows // 4
    for quad in range(num_quads):
        row = first + 4 * quad * stride
        for column in range(columns):
            a, b = load(x, row + column), load(x, row + stride + column)
            c, d = load(x, row + 2 * stride + column), load(x, row + 3 * stride + column)
            store(sums, column, sums[column] + ((a + b) + (c + d)))
    for index in range(4 * num_quads, rows):
        row = first + index * stride
        for column in range(columns):
            store(sums, column, sums[column] + load(x, row + column))


@register_jitable(fastmath={"contract"})
def sum_differences(
    x: Any, first: Any, columns: Any, rows: Any, stride: Any, centers: Any, sums: Any, squares: Any
) -> None:
    """Adds up differences of x from a center, and their squares, for each column.

    Args:
        x: See `sum_values`.
        first: See `sum_values`.
        columns: See `sum_values`.
        rows: See `sum_values`.
        stride: See `sum_values`.
        centers: U [columns].
        sums: U [columns]: the differences are added to it.
        squares: U [columns]: the squares are added to it.
    """
    num_quads = rows // 4
    for quad in range(num_quads):
        row = first + 4 * quad * stride
        for column in range(columns):
            center = load(centers, column)
            a, b = load(x, row + column) - center, load(x, row + stride + column) - center
            c, d = load(x, row + 2 * stride + column) - center, load(x, row + 3 * stride + column) - center
            store(sums, column, sums[column] + ((a + b) + (c + d)))
            store(squares, column, squares[column] + ((a * a + b * b) + (c * c + d * d)))
    for index in range(4 * num_quads, rows):
        row = first + index * stride
        for column in range(columns):
            a = load(x, row + column) - load(centers, column)
            store(sums, column, sums[column] + a)
            store(squares, column, squares[column] + a * a)


@register_jitable(fastmath={"contract"})
def sum_products(
    dy: Any,
    x: Any,
    first: Any,
    columns: Any,
    rows: Any,
    stride: Any,
    mean: Any,
    reduction: Any,
    reduced_mean: Any,
    has_relu: Any,
    multiplier: Any,
    offset: Any,
    totals: Any,
    dots: Any,
) -> None:
    """Adds up dy and dy (x - mean) reduction for each column.

    Args:
        dy: T, flat.
        x: See `sum_values`.
        first: See `sum_values`.
        columns: See `sum_values`.
        rows: See `sum_values`.
        stride: See `sum_values`.
        mean: U [columns].
        reduction: U [columns]: see `power_of_two`.
        reduced_mean: U [columns]: mean reduction. As reduction is a power of two, x reduction - reduced_mean is
            (x - mean) reduction to the bit.
        has_relu: Whether a relu followed y; then dy is first replaced by the gradient with respect to y.
        multiplier: U [columns]; read if `has_relu`.
        offset: U [columns]; read if `has_relu`.
        totals: U [columns]: dy is added to it.
        dots: U [columns]: the products are added to it.
    """
    num_quads = rows // 4
    for quad in range(num_quads):
        row = first + 4 * quad * stride
        for column in range(columns):
            a, p = load(dy, row + column), load(x, row + column)
            b, q = load(dy, row + stride + column), load(x, row + stride + column)
            c, r = load(dy, row + 2 * stride + column), load(x, row + 2 * stride + column)
            d, s = load(dy, row + 3 * stride + column), load(x, row + 3 * stride + column)
            if has_relu:
                m, f, o = load(mean, column), load(multiplier, column), load(offset, column)
                a = relu_gradient(a, normalized(p - m, f, o))
                b = relu_gradient(b, normalized(q - m, f, o))
                c = relu_gradient(c, normalized(r - m, f, o))
                d = relu_gradient(d, normalized(s - m, f, o))
            i, m = load(reduction, column), load(reduced_mean, column)
            p, q, r, s = p * i - m, q * i - m, r * i - m, s * i - m
            store(totals, column, totals[column] + ((a + b) + (c + d)))
            store(dots, column, dots[column] + ((a * p + b * q) + (c * r + d * s)))
    for index in range(4 * num_quads, rows):
        row = first + index * stride
        for column in range(columns):
            g, difference = load(dy, row + column), load(x, row + column) - load(mean, column)
            if has_relu:
                g = relu_gradient(g, normalized(difference, load(multiplier, column), load(offset, column)))
            store(totals, column, totals[column] + g)
            store(dots, column, dots[column] + g * (difference * load(reduction, column)))


@register_jitable(fastmath={"contract"})
def add_to(sums: Any, block: Any, columns: Any) -> None:
    """Adds the sums of a block to the total sums.

    Args:
        sums: float64 [columns], the total sums.
        block: U [columns], the sums of the block.
        columns: The number of columns.
    """
    for column in range(columns):
        store(sums, column, sums[column] + load(block, column))
