"""Sums over the rows of x, and the formulas for one channel or one element, for the kernels in `cpu_loops`.

A block has at most BLOCK_ROWS rows, and every four of them are added up before they are added to the sum of their
column. So an element takes part in at most BLOCK_ROWS / 4 + 2 additions, in an order that does not depend on the width
of the processor's vectors. That bounds the error. Sums of blocks are added up in float64.

Elements of x after the last whole row belong to the last columns, and are added when chunks are combined.
Importing this imports Numba.
"""

import math
from typing import Any

import numpy as np
from numba.extending import register_jitable

from gradserve_server.devices.host.activations import INLINED, number_like
from gradserve_server.devices.host.intrinsics import load, store
from gradserve_server.devices.host.moments import is_far, merged_mean, squares_around_mean


@register_jitable(**INLINED)
def normalized(difference: Any, multiplier: Any, offset: Any) -> Any:
    """Returns y of the forward call; `difference` is x - mean.

    The gradient computes it again if there is a relu; the same arithmetic gives the same bits.
    """
    return difference * multiplier + offset


@register_jitable(**INLINED)
def relu(y: Any) -> Any:
    """Returns the larger of y and 0, NaN for NaN."""
    return number_like(y, 0) if y <= 0 else y


@register_jitable(**INLINED)
def relu_gradient(dy: Any, y: Any) -> Any:
    """Returns the gradient with respect to y, given the gradient with respect to relu(y)."""
    return dy if y > 0 else number_like(dy, 0)


@register_jitable
def forward_multiplier(variance: Any, scale: Any, epsilon: Any) -> Any:
    """Returns the factor of x - mean in y."""
    return scale / np.sqrt(variance + epsilon)


@register_jitable
def inverse_deviation(variance: Any, epsilon: Any) -> Any:
    """Returns 1 / sqrt(variance + epsilon), float64."""
    return 1 / np.sqrt(variance + epsilon)


@register_jitable
def power_of_two(inverse: Any) -> Any:
    """Returns a power of two that is about as large as the inverse of a deviation.

    Differences from the mean are multiplied by it before they are by dy, so the products have about the range of dy.
    A power of two costs them no digits.
    """
    return math.ldexp(1.0, math.frexp(inverse)[1]) if np.isfinite(inverse) else 1.0


@register_jitable(**INLINED)
def input_gradient(dy: Any, difference: Any, mean_of_dy: Any, slope: Any, factor: Any) -> Any:
    """Returns x_backprop in training.

    The factor comes last: multiplied into the slope, it could leave the range of float32 where the result does not.

    Args:
        dy: The gradient with respect to y.
        difference: x - mean.
        mean_of_dy: The mean of dy.
        slope: scale_backprop / count / sqrt(variance + epsilon).
        factor: scale / sqrt(variance + epsilon).
    """
    return (dy - mean_of_dy - difference * slope) * factor


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


TILE_COLUMNS = 1024
"""Columns that are processed together, so that their part of a chunk is still in a cache when it is read again."""


_NUM_SAMPLES = 16
"""Rows from the whole chunk, from which the means of columns are estimated."""


@register_jitable(fastmath={"contract"})
def moments_of_chunk(x: Any, columns: Any, chunk_first: Any, chunk_end: Any, scratch: Any, partial: Any) -> None:
    """Computes the mean of each column, and the sum of squared differences from it, over some rows.

    Args:
        x: T, flat.
        columns: The length of a row.
        chunk_first: The first row.
        chunk_end: The row after the last.
        scratch: U [3, TILE_COLUMNS].
        partial: float64 [2, columns]: the results.
    """
    size = chunk_end - chunk_first
    num_samples = min(size, _NUM_SAMPLES)
    for tile in range(0, columns, TILE_COLUMNS):
        tile_end = min(tile + TILE_COLUMNS, columns)
        width = tile_end - tile
        totals, squares = partial[0, tile:tile_end], partial[1, tile:tile_end]
        centers, origin = scratch[0], chunk_first * columns + tile
        centers[:width] = 0
        sum_values(x, origin, width, num_samples, size // num_samples * columns, centers)
        for column in range(width):
            centers[column] /= num_samples
        _differences_of_tile(x, origin, width, size, columns, scratch, totals, squares)
        num_far = 0
        for column in range(width):
            num_far += is_far(totals[column], squares[column], size)
        if num_far > 0:
            for column in range(width):
                centers[column] += totals[column] / size
            _differences_of_tile(x, origin, width, size, columns, scratch, totals, squares)
        num_finite = 0
        for column in range(width):
            store(squares, column, squares_around_mean(totals[column], squares[column], size))
            store(totals, column, load(centers, column) + totals[column] / size)
            num_finite += np.isfinite(squares[column])
        if num_finite < width:
            for column in range(width):
                if not np.isfinite(squares[column]):
                    totals[column], squares[column] = _moments_of_column(x, origin + column, size, columns)


@register_jitable(fastmath={"contract"})
def _moments_of_column(x: Any, first: Any, size: Any, stride: Any) -> Any:
    """Computes them in float64, for a column whose sums overflow."""
    total, squares = 0.0, 0.0
    for row in range(size):
        total += load(x, first + row * stride)
    mean = total / size
    if np.isfinite(mean):
        for row in range(size):
            difference = load(x, first + row * stride) - mean
            squares += difference * difference
        return mean, squares
    return mean, np.nan


@register_jitable(fastmath={"contract"})
def _differences_of_tile(
    x: Any, origin: Any, width: Any, rows: Any, columns: Any, scratch: Any, totals: Any, squares: Any
) -> None:
    """Computes for each column the sums of differences from its center, and of their squares."""
    centers, block_totals, block_squares = scratch[0], scratch[1], scratch[2]
    totals[:], squares[:] = 0, 0
    for row in range(0, rows, BLOCK_ROWS):
        block_totals[:width], block_squares[:width] = 0, 0
        num_rows = min(BLOCK_ROWS, rows - row)
        sum_differences(x, origin + row * columns, width, num_rows, columns, centers, block_totals, block_squares)
        add_to(totals, block_totals, width)
        add_to(squares, block_squares, width)


@register_jitable
def combine_moments(x: Any, repeats: Any, inner: Any, chunk_rows: Any, partial: Any, mean: Any, variance: Any) -> None:
    """Computes the moments of the channels.

    Args:
        x: T, flat.
        repeats: The number of times that a row repeats [channels, inner] elements.
        inner: See `repeats`.
        chunk_rows: The rows of a chunk.
        partial: float64 [chunks, 2, columns], from `moments_of_chunk`; changed.
        mean: float64 [channels], a result.
        variance: float64 [channels], a result.
    """
    channels = len(mean)
    columns = repeats * channels * inner
    rows = x.size // columns
    means, squares = partial[0, 0], partial[0, 1]
    for chunk in range(1, len(partial)):
        first, end = chunk * chunk_rows, min((chunk + 1) * chunk_rows, rows)
        weight = (end - first) / end
        for column in range(columns):
            delta = partial[chunk, 0, column] - means[column]
            store(means, column, merged_mean(means[column], partial[chunk, 0, column], weight))
            store(squares, column, squares[column] + (partial[chunk, 1, column] + weight * first * delta * delta))
    first_rest = columns - (x.size - rows * columns)
    for channel in range(channels):
        count, channel_mean, channel_squares = 0, 0.0, 0.0
        for repeat in range(repeats):
            for index in range(inner):
                column = (repeat * channels + channel) * inner + index
                delta = means[column] - channel_mean
                channel_mean = merged_mean(channel_mean, means[column], rows / (count + rows))
                channel_squares += squares[column] + delta * delta * (count * (rows / (count + rows)))
                count += rows
                if column >= first_rest:
                    last = load(x, x.size - columns + column)
                    delta = last - channel_mean
                    channel_mean = merged_mean(channel_mean, last, 1 / (count + 1))
                    channel_squares += delta * (last - channel_mean)
                    count += 1
        mean[channel], variance[channel] = channel_mean, channel_squares / count


@register_jitable
def products_of_chunk(
    dy: Any,
    x: Any,
    mean: Any,
    reduction: Any,
    multiplier: Any,
    offset: Any,
    chunk_first: Any,
    chunk_end: Any,
    scratch: Any,
    partial: Any,
) -> None:
    """Computes the sums of dy and of dy (x - mean) reduction for each column over some rows.

    Args:
        dy: T, flat.
        x: T, flat.
        mean: U [columns].
        reduction: U [columns]: see `power_of_two`.
        multiplier: U [columns] if a relu followed y, and dy must pass through its gradient first; otherwise empty.
        offset: U [columns], or empty like `multiplier`.
        chunk_first: The first row.
        chunk_end: The row after the last.
        scratch: U [3, TILE_COLUMNS].
        partial: float64 [2, columns]: the results.
    """
    columns, has_relu = len(mean), len(offset) > 0
    for tile in range(0, columns, TILE_COLUMNS):
        tile_end = min(tile + TILE_COLUMNS, columns)
        width = tile_end - tile
        totals, dots = partial[0, tile:tile_end], partial[1, tile:tile_end]
        block_totals, block_dots, reduced_mean = scratch[0], scratch[1], scratch[2]
        for column in range(width):
            reduced_mean[column] = mean[tile + column] * reduction[tile + column]
        tile_mean, tile_reduction = mean[tile:], reduction[tile:]
        tile_multiplier, tile_offset = multiplier[tile:], offset[tile:]
        totals[:], dots[:] = 0, 0
        for row in range(chunk_first, chunk_end, BLOCK_ROWS):
            rows = min(BLOCK_ROWS, chunk_end - row)
            block_totals[:width], block_dots[:width] = 0, 0
            sum_products(
                dy,
                x,
                row * columns + tile,
                width,
                rows,
                columns,
                tile_mean,
                tile_reduction,
                reduced_mean,
                has_relu,
                tile_multiplier,
                tile_offset,
                block_totals,
                block_dots,
            )
            add_to(totals, block_totals, width)
            add_to(dots, block_dots, width)


@register_jitable(fastmath={"contract"})
def combine_products(
    dy: Any,
    x: Any,
    mean: Any,
    reduction: Any,
    multiplier: Any,
    offset: Any,
    repeats: Any,
    inner: Any,
    partial: Any,
    totals: Any,
    dots: Any,
) -> None:
    """Computes the sums of the channels.

    Args:
        dy: T, flat.
        x: T, flat.
        mean: U [columns].
        reduction: See `products_of_chunk`.
        multiplier: See `products_of_chunk`.
        offset: See `products_of_chunk`.
        repeats: The number of times that a row repeats [channels, inner] elements.
        inner: See `repeats`.
        partial: float64 [chunks, 2, columns], from `products_of_chunk`; changed.
        totals: float64 [channels], a result.
        dots: float64 [channels], a result.
    """
    columns = len(mean)
    column_totals, column_dots = partial[0, 0], partial[0, 1]
    for chunk in range(1, len(partial)):
        for column in range(columns):
            store(column_totals, column, column_totals[column] + partial[chunk, 0, column])
            store(column_dots, column, column_dots[column] + partial[chunk, 1, column])
    for column in range(columns - x.size % columns, columns):
        index = x.size - columns + column
        g, difference = load(dy, index), load(x, index) - load(mean, column)
        if len(offset) > 0:
            g = relu_gradient(g, normalized(difference, load(multiplier, column), load(offset, column)))
        column_totals[column] += g
        column_dots[column] += g * (difference * load(reduction, column))
    channels = len(totals)
    totals[:], dots[:] = 0, 0
    for repeat in range(repeats):
        for channel in range(channels):
            for index in range(inner):
                column = (repeat * channels + channel) * inner + index
                totals[channel] += column_totals[column]
                dots[channel] += column_dots[column]
