"""FusedBatchNorm over rows: loops run along a row, across its channels. See `kernels`."""

from typing import Any

import numpy as np
from numba.extending import register_jitable

from gradserve_server.devices.host.intrinsics import DONE, count_up, load, store, wait_for, widen
from gradserve_server.ops.batch_norm.cpu.formulas import (
    forward_multiplier,
    input_gradient,
    inverse_deviation,
    normalized,
    relu,
    relu_gradient,
)
from gradserve_server.ops.batch_norm.cpu.row_sums import (
    TILE_COLUMNS,
    combine_moments,
    combine_products,
    moments_of_chunk,
    products_of_chunk,
)

_FIRST_TAKEN, _FIRST_DONE, _READY, _SECOND_TAKEN = range(1, 5)
"""The other counters: chunks of the first pass, taken and finished; the coefficients, ready; chunks of the second pass,
taken."""


def rows_forward(
    x: Any,
    scale: Any,
    offset: Any,
    epsilon: Any,
    is_training: Any,
    has_relu: Any,
    repeats: Any,
    inner: Any,
    chunk_rows: Any,
    partial: Any,
    coefficients: Any,
    mean: Any,
    variance: Any,
    y: Any,
    counters: Any,
) -> None:
    """Computes y, and in training the moments of x.

    Args:
        x: T, flat.
        scale: U [channels].
        offset: U [channels].
        epsilon: float64.
        is_training: Whether to normalise by the moments of x.
        has_relu: Whether a relu follows.
        repeats: The number of times that a row repeats [channels, inner] elements.
        inner: See `repeats`.
        chunk_rows: The rows of a chunk.
        partial: float64 [chunks, 2, columns].
        coefficients: U, flat [3 columns].
        mean: float64 [channels]: a result in training, else an input.
        variance: float64 [channels]: a result in training, else an input.
        y: T, flat: the result.
        counters: int64 [5], zeros.
    """
    channels = len(scale)
    columns = repeats * channels * inner
    rows = x.size // columns
    scratch = np.empty((3, TILE_COLUMNS), scale.dtype)
    num_first_chunks = len(partial) if is_training else 1
    chunk = count_up(counters, _FIRST_TAKEN)
    while chunk < num_first_chunks:
        if is_training:
            end = min((chunk + 1) * chunk_rows, rows)
            moments_of_chunk(x, columns, chunk * chunk_rows, end, scratch, partial[chunk])
        if count_up(counters, _FIRST_DONE) == num_first_chunks - 1:
            if is_training:
                combine_moments(x, repeats, inner, chunk_rows, partial, mean, variance)
            for column in range(columns):
                channel = column // inner % channels
                coefficients[column] = mean[channel]
                # From the rounded variance, which the gradient gets.
                rounded = widen(x, variance[channel])
                coefficients[columns + column] = forward_multiplier(rounded, scale[channel], epsilon)
                coefficients[2 * columns + column] = offset[channel]
            count_up(counters, _READY)
        chunk = count_up(counters, _FIRST_TAKEN)
    wait_for(counters, _READY, 1)
    _write_affine(x, coefficients, columns, chunk_rows, len(partial), counters, has_relu, y)


def rows_gradient(
    dy: Any,
    x: Any,
    scale: Any,
    mean: Any,
    reduction: Any,
    multiplier: Any,
    offset: Any,
    variance: Any,
    epsilon: Any,
    is_training: Any,
    repeats: Any,
    inner: Any,
    chunk_rows: Any,
    partial: Any,
    coefficients: Any,
    totals: Any,
    dots: Any,
    dscale: Any,
    doffset: Any,
    dx: Any,
    counters: Any,
) -> None:
    """Computes the gradients with respect to x, scale and offset.

    Args:
        dy: T, flat.
        x: T, flat.
        scale: U [channels].
        mean: U [columns], repeated as in a row.
        reduction: U [columns]: the `power_of_two` for each channel, repeated as in a row.
        multiplier: U [columns], if a relu followed: the factor of x - mean in y. Otherwise empty.
        offset: U [columns], the forward call's, if a relu followed. Otherwise empty.
        variance: U [channels].
        epsilon: float64.
        is_training: Whether mean and variance depend on x.
        repeats: See `rows_forward`.
        inner: See `rows_forward`.
        chunk_rows: The rows of a chunk.
        partial: float64 [chunks, 2, columns].
        coefficients: U, flat [3 columns].
        totals: float64 [channels].
        dots: float64 [channels].
        dscale: U [channels]: the result.
        doffset: U [channels]: the result.
        dx: T, flat: the result.
        counters: int64 [5], zeros.
    """
    channels = len(scale)
    columns = repeats * channels * inner
    rows = x.size // columns
    num_chunks = len(partial)
    scratch = np.empty((3, TILE_COLUMNS), scale.dtype)
    chunk = count_up(counters, _FIRST_TAKEN)
    while chunk < num_chunks:
        end = min((chunk + 1) * chunk_rows, rows)
        products_of_chunk(dy, x, mean, reduction, multiplier, offset, chunk * chunk_rows, end, scratch, partial[chunk])
        if count_up(counters, _FIRST_DONE) == num_chunks - 1:
            combine_products(dy, x, mean, reduction, multiplier, offset, repeats, inner, partial, totals, dots)
            count = x.size // channels
            for channel in range(channels):
                inverse = inverse_deviation(variance[channel], epsilon)
                dots[channel] *= inverse / load(reduction, channel * inner)
                dscale[channel], doffset[channel] = dots[channel], totals[channel]
            for column in range(columns):
                channel = column // inner % channels
                inverse = inverse_deviation(variance[channel], epsilon)
                coefficients[column] = totals[channel] / count if is_training else 0
                coefficients[columns + column] = scale[channel] * inverse
                coefficients[2 * columns + column] = inverse * (dots[channel] / count) if is_training else 0
            count_up(counters, _READY)
        chunk = count_up(counters, _FIRST_TAKEN)
    wait_for(counters, _READY, 1)
    if is_training or len(offset) > 0:
        _write_gradient(
            dy, x, mean, multiplier, offset, is_training, coefficients, columns, chunk_rows, num_chunks, counters, dx
        )
    else:
        _write_affine(dy, coefficients, columns, chunk_rows, num_chunks, counters, False, dx)


@register_jitable(fastmath={"contract"})
def _write_affine(
    x: Any, coefficients: Any, columns: Any, chunk_rows: Any, num_chunks: Any, counters: Any, has_relu: Any, y: Any
) -> None:
    """Writes y = (x - a) b + c, with a, b and c the coefficients, or the relu of that."""
    rows = -(-x.size // columns)
    # Backwards, because what was read last is still in the cache.
    chunk = num_chunks - 1 - count_up(counters, _SECOND_TAKEN)
    while chunk >= 0:
        end = (chunk + 1) * chunk_rows if chunk < num_chunks - 1 else rows
        for index in range(chunk * chunk_rows, end):
            # The last row may begin before the end of the row before it.
            row = min(index * columns, x.size - columns)
            for column in range(columns):
                difference = load(x, row + column) - load(coefficients, column)
                factor, summand = load(coefficients, columns + column), load(coefficients, 2 * columns + column)
                value = normalized(difference, factor, summand)
                store(y, row + column, relu(value) if has_relu else value)
        count_up(counters, DONE)
        chunk = num_chunks - 1 - count_up(counters, _SECOND_TAKEN)


@register_jitable(fastmath={"contract"})
def _write_gradient(
    dy: Any,
    x: Any,
    mean: Any,
    multiplier: Any,
    offset: Any,
    is_training: Any,
    coefficients: Any,
    columns: Any,
    chunk_rows: Any,
    num_chunks: Any,
    counters: Any,
    dx: Any,
) -> None:
    """Writes dx = (dy - a - (x - mean) c) b, with a, b and c the coefficients; dy b unless in training."""
    has_relu = len(offset) > 0
    rows = -(-x.size // columns)
    chunk = num_chunks - 1 - count_up(counters, _SECOND_TAKEN)
    while chunk >= 0:
        end = (chunk + 1) * chunk_rows if chunk < num_chunks - 1 else rows
        for index in range(chunk * chunk_rows, end):
            row = min(index * columns, x.size - columns)
            for column in range(columns):
                g, difference = load(dy, row + column), load(x, row + column) - load(mean, column)
                if has_relu:
                    g = relu_gradient(g, normalized(difference, load(multiplier, column), load(offset, column)))
                factor = load(coefficients, columns + column)
                if is_training:
                    mean_of_dy, slope = load(coefficients, column), load(coefficients, 2 * columns + column)
                    store(dx, row + column, input_gradient(g, difference, mean_of_dy, slope, factor))
                else:
                    store(dx, row + column, g * factor)
        count_up(counters, DONE)
        chunk = num_chunks - 1 - count_up(counters, _SECOND_TAKEN)
