"""Mean and variance in Numba's loops. Importing this imports Numba, which takes half a second.

Moments are first computed from differences from an estimate of the mean. If the estimate is further than a standard
deviation from the mean, the sum of squares is too inexact, and they are computed again from the mean that was found.
If sums overflow in float32, or squares are so small that they lose digits, they are computed again from multiples.
"""

from typing import Any

import numpy as np
from numba.extending import register_jitable

from gradserve_server.devices.host.activations import INLINED
from gradserve_server.devices.host.intrinsics import load, widen
from gradserve_server.devices.host.lanes import in_all_lanes, last_lanes, load_lanes, num_lanes, sum_of_lanes

BLOCK_ELEMENTS = 1024
"""The most elements of a block, so that none of its sums is rounded more than 40 times."""

_REDUCED, _ENLARGED = 2.0**-80, 2.0**100
"""Powers of two with which no square of float32 overflows, and none above `_LEAST_SQUARE` loses digits."""

_LEAST_SQUARE = 2.0**-120
"""The least mean of squares that have all their digits in float32."""


@register_jitable(**INLINED)
def moments_of_block(x: Any, first: Any, size: Any, keeps_small: Any) -> Any:
    """Returns the mean of x[first : first + size], and the sum of squared differences from it, both float64.

    Args:
        x: T, flat.
        first: The index of the first element.
        size: From 1 to BLOCK_ELEMENTS.
        keeps_small: Whether squares below the normal range of float32 keep their digits, too; then a block of equal
            numbers takes longer. A constant.
    """
    center = _estimated_mean(x, first, size)
    total, squares = _differences_of_block(x, first, size, center, 1, 1)
    if is_far(total, squares, size):
        center = widen(x, center + total / size)
        total, squares = _differences_again(x, first, size, center, 1, 1)
    if not (_LEAST_SQUARE * size if keeps_small else 0.0) <= squares < np.inf:
        return _moments_of_extremes(x, first, size, squares)
    return center + total / size, squares_around_mean(total, squares, size)


@register_jitable(fastmath={"contract"})
def _moments_of_extremes(x: Any, first: Any, size: Any, squares: Any) -> Any:
    """Does what `moments_of_block` does, for numbers whose sum of squares was too small, or not finite."""
    is_small = squares < 1
    before, after = (1.0, _ENLARGED) if is_small else (_REDUCED, 1.0)
    center = _estimated_mean(x, first, size)
    total, squares = _differences_again(x, first, size, center, before, after)
    factor = before * after
    if is_far(total, squares, size):
        center = widen(x, center + total / size / factor)
        total, squares = _differences_again(x, first, size, center, before, after)
    if not np.isfinite(squares):
        total = 0.0
        for index in range(first, first + size):
            total += load(x, index)
        mean = total / size
        return mean, np.inf if np.isfinite(mean) else np.nan
    return center + total / size / factor, squares_around_mean(total, squares, size) / factor / factor


@register_jitable(**INLINED)
def merged_mean(mean: Any, other: Any, weight: Any) -> Any:
    """Returns the mean of two groups of numbers, float64.

    Args:
        mean: The mean of one group.
        other: The mean of the other group.
        weight: The share of that group.
    """
    merged = mean + weight * (other - mean)
    # With an infinity in one of the groups, the difference is not a number where the mean is infinite.
    return merged if merged == merged else mean * (1 - weight) + other * weight


@register_jitable(**INLINED)
def squares_around_mean(total: Any, squares: Any, count: Any) -> Any:
    """Returns the sum of squared differences from the mean.

    Args:
        total: The sum of the differences from another number.
        squares: The sum of their squares.
        count: The number of numbers.
    """
    return squares - total * (total / count)


@register_jitable(**INLINED)
def is_far(total: Any, squares: Any, count: Any) -> Any:
    """Returns True if that other number is further than a standard deviation from the mean, and for NaN.

    Otherwise `squares` is at most twice the result of `squares_around_mean`, and little is lost.
    """
    return not total * (total / count) <= squares_around_mean(total, squares, count)


@register_jitable(**INLINED)
def _estimated_mean(x: Any, first: Any, size: Any) -> Any:
    """Returns the mean of eight elements from the whole block, in the dtype of arithmetic."""
    step = (size - 1) // 7
    part = widen(x, 1 / 8)  # of each before they are added up, so that no sum overflows
    a = load(x, first) * part + load(x, first + step) * part
    b = load(x, first + 2 * step) * part + load(x, first + 3 * step) * part
    first += 4 * step
    c = load(x, first) * part + load(x, first + step) * part
    d = load(x, first + 2 * step) * part + load(x, first + 3 * step) * part
    return (a + b) + (c + d)


@register_jitable(**INLINED)
def _differences_of_block(x: Any, first: Any, size: Any, center: Any, before: Any, after: Any) -> Any:
    """Returns the sums of differences from the center, and of their squares.

    Args:
        x: See `moments_of_block`.
        first: See `moments_of_block`.
        size: See `moments_of_block`.
        center: The center.
        before: Numbers and center are multiplied by this, which costs nothing if it is a constant 1.
        after: The differences are multiplied by this.
    """
    lanes = num_lanes(x)
    before, after = widen(x, before), widen(x, after)
    center *= before
    factors, of_differences = in_all_lanes(before), in_all_lanes(after)
    num_rows = size // lanes
    num_quads = num_rows // 4
    centers = in_all_lanes(center)
    sums = in_all_lanes(widen(x, 0))
    squares = in_all_lanes(widen(x, 0))
    for quad in range(num_quads):
        at = first + 4 * quad * lanes
        a = (load_lanes(x, at) * factors - centers) * of_differences
        b = (load_lanes(x, at + lanes) * factors - centers) * of_differences
        c = (load_lanes(x, at + 2 * lanes) * factors - centers) * of_differences
        d = (load_lanes(x, at + 3 * lanes) * factors - centers) * of_differences
        sums += (a + b) + (c + d)
        squares += (a * a + b * b) + (c * c + d * d)
    for row in range(4 * num_quads, num_rows):
        a = (load_lanes(x, first + row * lanes) * factors - centers) * of_differences
        sums += a
        squares += a * a
    rest = size - num_rows * lanes
    if rest > 0 and num_rows > 0:
        a = last_lanes((load_lanes(x, first + size - lanes) * factors - centers) * of_differences, rest)
        sums += a
        squares += a * a
    total = sum_of_lanes(sums)
    total_squares = sum_of_lanes(squares)
    if num_rows == 0:
        for index in range(first, first + size):
            difference = (load(x, index) * before - center) * after
            total += difference
            total_squares += difference * difference
    return total, total_squares


@register_jitable(fastmath={"contract"})
def _differences_again(x: Any, first: Any, size: Any, center: Any, before: Any, after: Any) -> Any:
    """Does the same in a function of its own, because this is rarely needed."""
    return _differences_of_block(x, first, size, center, before, after)
