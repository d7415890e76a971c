"""Sums over rows. See `kernels`.

Elements of x after the last whole row belong to the last columns, and are added when chunks are combined.
"""

from typing import Any

import numpy as np
from numba.extending import register_jitable

from gradserve_server.devices.host.intrinsics import load, store
from gradserve_server.devices.host.moments import is_far, merged_mean, squares_around_mean
from gradserve_server.ops.batch_norm.cpu.block_sums import (
    BLOCK_ROWS,
    add_to,
    sum_differences,
    sum_products,
    sum_values,
)
from gradserve_server.ops.batch_norm.cpu.formulas import normalized, relu_gradient

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
