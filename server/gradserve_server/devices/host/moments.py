"""Mean and variance in Numba's loops. Importing this imports Numba, which takes half a second.

Moments are first computed from differences from an estimate of the mean. If the estimate is further than a standard
deviation from the mean, the sum of squares is too inexact, and they are computed again from the mean that was found.
"""

from typing import Any

from numba.extending import register_jitable

from gradserve_server.devices.host.activations import INLINED
from gradserve_server.devices.host.intrinsics import load, widen
from gradserve_server.devices.host.lanes import in_all_lanes, last_lanes, load_lanes, num_lanes, sum_of_lanes

BLOCK_ELEMENTS = 1024
"""The most elements of a block, so that none of its sums is rounded more than 40 times."""


@register_jitable(**INLINED)
def moments_of_block(x: Any, first: Any, size: Any) -> Any:
    """Returns the mean of x[first : first + size], and the sum of squared differences from it, both float64.

    Args:
        x: T, flat.
        first: The index of the first element.
        size: From 1 to BLOCK_ELEMENTS.
    """
    center = _estimated_mean(x, first, size)
    total, squares = _differences_of_block(x, first, size, center)
    if is_far(total, squares, size):
        center = widen(x, center + total / size)
        total, squares = _differences_again(x, first, size, center)
    return center + total / size, squares_around_mean(total, squares, size)


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
    a, b = load(x, first) + load(x, first + step), load(x, first + 2 * step) + load(x, first + 3 * step)
    first += 4 * step
    c, d = load(x, first) + load(x, first + step), load(x, first + 2 * step) + load(x, first + 3 * step)
    return ((a + b) + (c + d)) * widen(x, 1 / 8)


@register_jitable(**INLINED)
def _differences_of_block(x: Any, first: Any, size: Any, center: Any) -> Any:
    """Returns the sums of differences from the center, and of their squares."""
    lanes = num_lanes(x)
    num_rows = size // lanes
    num_quads = num_rows // 4
    centers = in_all_lanes(center)
    sums = in_all_lanes(widen(x, 0))
    squares = in_all_lanes(widen(x, 0))
    for quad in range(num_quads):
        at = first + 4 * quad * lanes
        a, b = load_lanes(x, at) - centers, load_lanes(x, at + lanes) - centers
        c, d = load_lanes(x, at + 2 * lanes) - centers, load_lanes(x, at + 3 * lanes) - centers
        sums += (a + b) + (c + d)
        squares += (a * a + b * b) + (c * c + d * d)
    for row in range(4 * num_quads, num_rows):
        a = load_lanes(x, first + row * lanes) - centers
        sums += a
        squares += a * a
    rest = size - num_rows * lanes
    if rest > 0 and num_rows > 0:
        a = last_lanes(load_lanes(x, first + size - lanes) - centers, rest)
        sums += a
        squares += a * a
    total = sum_of_lanes(sums)
    total_squares = sum_of_lanes(squares)
    if num_rows == 0:
        for index in range(first, first + size):
            difference = load(x, index) - center
            total += difference
            total_squares += difference * difference
    return total, total_squares


@register_jitable(fastmath={"contract"})
def _differences_again(x: Any, first: Any, size: Any, center: Any) -> Any:
    """Does the same in a function of its own, because this is rarely needed."""
    return _differences_of_block(x, first, size, center)
