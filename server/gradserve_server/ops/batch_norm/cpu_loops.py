"""The kernels of FusedBatchNorm and its gradient on the host, for x as rows and as planes; see `cpu`.

For rows, loops run along a row, across its channels; for planes, along a plane. Importing this imports Numba.
"""

from typing import Any

import numpy as np
from numba.extending import register_jitable

from gradserve_server.devices.host.activations import INLINED
from gradserve_server.devices.host.intrinsics import DONE, count_up, load, store, wait_for, widen
from gradserve_server.devices.host.lanes import (
    in_all_lanes,
    last_lanes,
    load_lanes,
    num_lanes,
    sum_of_lanes,
    where_positive,
)
from gradserve_server.devices.host.moments import BLOCK_ELEMENTS, merged_mean, moments_of_block
from gradserve_server.ops.batch_norm.cpu_sums import (
    TILE_COLUMNS,
    combine_moments,
    combine_products,
    forward_multiplier,
    input_gradient,
    inverse_deviation,
    moments_of_chunk,
    normalized,
    power_of_two,
    products_of_chunk,
    relu,
    relu_gradient,
)

_TAKEN = 1
"""The counter of the kernels for planes: chunks taken."""

_FIRST_TAKEN, _FIRST_DONE, _READY, _SECOND_TAKEN = range(1, 5)
"""The counters of the kernels for rows: chunks of the first pass, taken and finished; the coefficients, ready; chunks
of the second pass, taken."""


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


def planes_forward(
    x: Any,
    scale: Any,
    offset: Any,
    epsilon: Any,
    is_training: Any,
    has_relu: Any,
    inner: Any,
    chunk_channels: Any,
    factors: Any,
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
        inner: The size of a plane.
        chunk_channels: The channels of a chunk.
        factors: U [5, channels]: scratch memory.
        mean: float64 [channels]: a result in training, else an input.
        variance: float64 [channels]: a result in training, else an input.
        y: T, flat: the result.
        counters: int64 [2], zeros.
    """
    channels, means, multipliers = len(scale), factors[0], factors[1]
    outer = x.size // (channels * inner)
    num_chunks = -(-channels // chunk_channels)
    chunk = count_up(counters, _TAKEN)
    while chunk < num_chunks:
        channel_first, channel_end = chunk * chunk_channels, min((chunk + 1) * chunk_channels, channels)
        if is_training:
            mean[channel_first:channel_end], variance[channel_first:channel_end] = 0, 0
            for image in range(outer):
                for channel in range(channel_first, channel_end):
                    plane = (image * channels + channel) * inner
                    for first in range(0, inner, BLOCK_ELEMENTS):
                        size = min(BLOCK_ELEMENTS, inner - first)
                        block_mean, block_squares = moments_of_block(x, plane + first, size, False)
                        before = image * inner + first
                        weight = size / (before + size)
                        delta = block_mean - mean[channel]
                        mean[channel] = merged_mean(mean[channel], block_mean, weight)
                        variance[channel] += block_squares + weight * before * delta * delta
            for channel in range(channel_first, channel_end):
                variance[channel] /= outer * inner
        for channel in range(channel_first, channel_end):
            # From the rounded variance, which the gradient gets.
            rounded = widen(x, variance[channel])
            means[channel], multipliers[channel] = mean[channel], forward_multiplier(rounded, scale[channel], epsilon)
        for image in range(outer - 1, -1, -1):
            for channel in range(channel_first, channel_end):
                m, multiplier, summand = means[channel], multipliers[channel], offset[channel]
                plane = (image * channels + channel) * inner
                for index in range(plane, plane + inner):
                    value = normalized(load(x, index) - m, multiplier, summand)
                    store(y, index, relu(value) if has_relu else value)
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def planes_gradient(
    dy: Any,
    x: Any,
    scale: Any,
    mean: Any,
    offset: Any,
    variance: Any,
    epsilon: Any,
    is_training: Any,
    inner: Any,
    chunk_channels: Any,
    factors: Any,
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
        mean: U [channels].
        offset: U [channels], the forward call's, if a relu followed; otherwise empty.
        variance: U [channels].
        epsilon: float64.
        is_training: Whether mean and variance depend on x.
        inner: The size of a plane.
        chunk_channels: The channels of a chunk.
        factors: U [5, channels]: scratch memory.
        totals: float64 [channels].
        dots: float64 [channels].
        dscale: U [channels]: the result.
        doffset: U [channels]: the result.
        dx: T, flat: the result.
        counters: int64 [2], zeros.
    """
    channels, has_relu = len(scale), len(offset) > 0
    multipliers, reductions, of_dy, of_x, means_of_dy = factors[0], factors[1], factors[2], factors[3], factors[4]
    outer = x.size // (channels * inner)
    num_chunks = -(-channels // chunk_channels)
    chunk = count_up(counters, _TAKEN)
    while chunk < num_chunks:
        channel_first, channel_end = chunk * chunk_channels, min((chunk + 1) * chunk_channels, channels)
        totals[channel_first:channel_end], dots[channel_first:channel_end] = 0, 0
        for channel in range(channel_first, channel_end):
            multipliers[channel] = forward_multiplier(variance[channel], scale[channel], epsilon)
            reductions[channel] = power_of_two(inverse_deviation(variance[channel], epsilon))
        for image in range(outer):
            for channel in range(channel_first, channel_end):
                plane = (image * channels + channel) * inner
                b, reduction = multipliers[channel], reductions[channel]
                c = offset[channel] if has_relu else widen(x, 0)
                for first in range(0, inner, BLOCK_ELEMENTS):
                    size = min(BLOCK_ELEMENTS, inner - first)
                    if has_relu:
                        total, dot = _relu_products(dy, x, mean[channel], reduction, b, c, plane + first, size)
                    else:
                        total, dot = _plain_products(dy, x, mean[channel], reduction, b, c, plane + first, size)
                    totals[channel] += total
                    dots[channel] += dot
        for channel in range(channel_first, channel_end):
            inverse = inverse_deviation(variance[channel], epsilon)
            dots[channel] *= inverse / reductions[channel]
            dscale[channel], doffset[channel] = dots[channel], totals[channel]
            of_dy[channel], of_x[channel] = scale[channel] * inverse, inverse * (dots[channel] / (outer * inner))
            means_of_dy[channel] = totals[channel] / (outer * inner)
        for image in range(outer - 1, -1, -1):
            for channel in range(channel_first, channel_end):
                f, s, m, mean_dy = of_dy[channel], of_x[channel], mean[channel], means_of_dy[channel]
                b = multipliers[channel]
                c = offset[channel] if has_relu else widen(x, 0)
                plane = (image * channels + channel) * inner
                if is_training:
                    for index in range(plane, plane + inner):
                        g, difference = load(dy, index), load(x, index) - m
                        if has_relu:
                            g = relu_gradient(g, normalized(difference, b, c))
                        store(dx, index, input_gradient(g, difference, mean_dy, s, f))
                else:
                    for index in range(plane, plane + inner):
                        g = load(dy, index)
                        if has_relu:
                            g = relu_gradient(g, normalized(load(x, index) - m, b, c))
                        store(dx, index, g * f)
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def _products_of_block(has_relu: bool) -> Any:
    """Returns a function that sums dy and dy (x - mean) reduction over `size` elements; see `power_of_two`.

    For a relu, dy is the gradient of y.
    """

    @register_jitable(**INLINED)
    def products(dy: Any, x: Any, mean: Any, reduction: Any, b: Any, c: Any, first: Any, size: Any) -> Any:
        lanes = num_lanes(x)
        num_rows = size // lanes
        num_pairs = num_rows // 2
        means, reductions = in_all_lanes(mean), in_all_lanes(reduction)
        factors, summands = in_all_lanes(b), in_all_lanes(c)
        totals = in_all_lanes(widen(x, 0))
        dots = in_all_lanes(widen(x, 0))
        for pair in range(num_pairs):
            at = first + 2 * pair * lanes
            g, p = load_lanes(dy, at), load_lanes(x, at) - means
            h, q = load_lanes(dy, at + lanes), load_lanes(x, at + lanes) - means
            if has_relu:
                g = where_positive(g, normalized(p, factors, summands))
                h = where_positive(h, normalized(q, factors, summands))
            totals += g + h
            dots += g * (p * reductions) + h * (q * reductions)
        for row in range(2 * num_pairs, num_rows):
            at = first + row * lanes
            g, p = load_lanes(dy, at), load_lanes(x, at) - means
            if has_relu:
                g = where_positive(g, normalized(p, factors, summands))
            totals += g
            dots += g * (p * reductions)
        rest = size - num_rows * lanes
        if rest > 0 and num_rows > 0:
            at = first + size - lanes
            g, p = load_lanes(dy, at), load_lanes(x, at) - means
            if has_relu:
                g = where_positive(g, normalized(p, factors, summands))
            totals += last_lanes(g, rest)
            dots += last_lanes(g * (p * reductions), rest)
        total = sum_of_lanes(totals)
        dot = sum_of_lanes(dots)
        if num_rows == 0:
            for index in range(first, first + size):
                value, difference = load(dy, index), load(x, index) - mean
                if has_relu:
                    value = relu_gradient(value, normalized(difference, b, c))
                total += value
                dot += value * (difference * reduction)
        return total, dot

    return products


_plain_products, _relu_products = _products_of_block(False), _products_of_block(True)
