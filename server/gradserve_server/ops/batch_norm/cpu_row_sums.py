"""Sums over rows. See `cpu_kernels`.

What is left of x after the last whole row belongs to the last columns, and is added when chunks are combined.
"""

from typing import Any

from numba.extending import register_jitable

from gradserve_server.devices.intrinsics import load, store
from gradserve_server.ops.batch_norm.cpu_formulas import normalized, relu_gradient

_BLOCK_ROWS = 128


@register_jitable
def moments_of_chunk(x: Any, columns: Any, chunk_first: Any, chunk_end: Any, scratch: Any, partial: Any) -> None:
    """Computes for each column the mean, and the sum of squared differences from it, of some rows.

    Args:
        x: T, flat.
        columns: The length of a row.
        chunk_first: The first row.
        chunk_end: The row after the last.
        scratch: U [2, columns].
        partial: float64 [2, columns]: the results.
    """
    sums, sums_of_squares = scratch[0], scratch[1]
    means, squares = partial[0], partial[1]
    means[:], squares[:] = 0, 0
    for first in range(chunk_first, chunk_end, _BLOCK_ROWS):
        end = min(first + _BLOCK_ROWS, chunk_end)
        _sum_block(x, columns, first, end, sums, sums_of_squares)
        size = end - first
        weight = size / (end - chunk_first)
        cross_weight = weight * (first - chunk_first)
        for column in range(columns):
            offset = sums[column] / size
            delta = load(x, first * columns + column) + offset - means[column]
            block_squares = sums_of_squares[column] - sums[column] * offset
            store(means, column, means[column] + weight * delta)
            store(squares, column, squares[column] + (block_squares + cross_weight * delta * delta))


@register_jitable(fastmath={"contract"})
def _sum_block(x: Any, columns: Any, first: Any, end: Any, sums: Any, sums_of_squares: Any) -> None:
    """Sums, and sums of squares, of differences from the first row.

    No element of n is further than sqrt(n) standard deviations from their mean. So whatever the first row is, the sum
    of squares is at most n + 1 times that of the differences from the mean, and little is lost when one is
    computed from the other.
    """
    sums[:], sums_of_squares[:] = 0, 0
    origin = first * columns
    num_quads = (end - first) // 4
    for quad in range(num_quads):
        row = origin + 4 * quad * columns
        for column in range(columns):
            at_origin = load(x, origin + column)
            a = load(x, row + column) - at_origin
            b = load(x, row + columns + column) - at_origin
            c = load(x, row + 2 * columns + column) - at_origin
            d = load(x, row + 3 * columns + column) - at_origin
            store(sums, column, sums[column] + ((a + b) + (c + d)))
            store(sums_of_squares, column, sums_of_squares[column] + ((a * a + b * b) + (c * c + d * d)))
    for index in range(first + 4 * num_quads, end):
        for column in range(columns):
            a = load(x, index * columns + column) - load(x, origin + column)
            store(sums, column, sums[column] + a)
            store(sums_of_squares, column, sums_of_squares[column] + a * a)


@register_jitable
def combine_moments(x: Any, repeats: Any, inner: Any, chunk_rows: Any, partial: Any, mean: Any, variance: Any) -> None:
    """Computes the moments of the channels.

    Args:
        x: T, flat.
        repeats: A row is `repeats` times [channels, inner] elements.
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
            store(means, column, means[column] + weight * delta)
            store(squares, column, squares[column] + (partial[chunk, 1, column] + weight * first * delta * delta))
    first_rest = columns - (x.size - rows * columns)
    for channel in range(channels):
        count, channel_mean, channel_squares = 0, 0.0, 0.0
        for repeat in range(repeats):
            for index in range(inner):
                column = (repeat * channels + channel) * inner + index
                delta = means[column] - channel_mean
                channel_mean += delta * (rows / (count + rows))
                channel_squares += squares[column] + delta * delta * (count * (rows / (count + rows)))
                count += rows
                if column >= first_rest:
                    delta = load(x, x.size - columns + column) - channel_mean
                    channel_mean += delta / (count + 1)
                    channel_squares += delta * delta * (count / (count + 1))
                    count += 1
        mean[channel], variance[channel] = channel_mean, channel_squares / count


@register_jitable
def products_of_chunk(
    dy: Any,
    x: Any,
    mean: Any,
    multiplier: Any,
    offset: Any,
    chunk_first: Any,
    chunk_end: Any,
    scratch: Any,
    partial: Any,
) -> None:
    """Computes for each column the sums of dy and of dy (x - mean) over some rows.

    Args:
        dy: T, flat.
        x: T, flat.
        mean: U [columns].
        multiplier: U [columns] if y went through a relu, that dy is first to be led through; else empty.
        offset: As `multiplier`.
        chunk_first: The first row.
        chunk_end: The row after the last.
        scratch: U [2, columns].
        partial: float64 [2, columns]: the results.
    """
    block_totals, block_dots = scratch[0], scratch[1]
    totals, dots = partial[0], partial[1]
    totals[:], dots[:] = 0, 0
    for first in range(chunk_first, chunk_end, _BLOCK_ROWS):
        end = min(first + _BLOCK_ROWS, chunk_end)
        _sum_products_of_block(dy, x, mean, multiplier, offset, first, end, block_totals, block_dots)
        for column in range(len(mean)):
            store(totals, column, totals[column] + block_totals[column])
            store(dots, column, dots[column] + block_dots[column])


@register_jitable(fastmath={"contract"})
def _sum_products_of_block(
    dy: Any, x: Any, mean: Any, multiplier: Any, offset: Any, first: Any, end: Any, totals: Any, dots: Any
) -> None:
    totals[:], dots[:] = 0, 0
    columns, has_relu = len(mean), len(offset) > 0
    num_quads = (end - first) // 4
    for quad in range(num_quads):
        row = (first + 4 * quad) * columns
        for column in range(columns):
            m = load(mean, column)
            first_dy, first_x = load(dy, row + column), load(x, row + column) - m
            second_dy, second_x = load(dy, row + columns + column), load(x, row + columns + column) - m
            third_dy, third_x = load(dy, row + 2 * columns + column), load(x, row + 2 * columns + column) - m
            fourth_dy, fourth_x = load(dy, row + 3 * columns + column), load(x, row + 3 * columns + column) - m
            if has_relu:
                b, c = load(multiplier, column), load(offset, column)
                first_dy = relu_gradient(first_dy, normalized(first_x, b, c))
                second_dy = relu_gradient(second_dy, normalized(second_x, b, c))
                third_dy = relu_gradient(third_dy, normalized(third_x, b, c))
                fourth_dy = relu_gradient(fourth_dy, normalized(fourth_x, b, c))
            store(totals, column, totals[column] + ((first_dy + second_dy) + (third_dy + fourth_dy)))
            products = (first_dy * first_x + second_dy * second_x) + (third_dy * third_x + fourth_dy * fourth_x)
            store(dots, column, dots[column] + products)
    for index in range(first + 4 * num_quads, end):
        row = index * columns
        for column in range(columns):
            g, difference = load(dy, row + column), load(x, row + column) - load(mean, column)
            if has_relu:
                g = relu_gradient(g, normalized(difference, load(multiplier, column), load(offset, column)))
            store(totals, column, totals[column] + g)
            store(dots, column, dots[column] + g * difference)


@register_jitable(fastmath={"contract"})
def combine_products(
    dy: Any,
    x: Any,
    mean: Any,
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
        multiplier: As for `products_of_chunk`.
        offset: As for `products_of_chunk`.
        repeats: A row is `repeats` times [channels, inner] elements.
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
        column_dots[column] += g * difference
    channels = len(totals)
    totals[:], dots[:] = 0, 0
    for repeat in range(repeats):
        for channel in range(channels):
            for index in range(inner):
                column = (repeat * channels + channel) * inner + index
                totals[channel] += column_totals[column]
                dots[channel] += column_dots[column]
