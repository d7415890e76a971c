"""The kernels of LayerNorm and LayerNormGrad on the host; see `cpu`. Importing this imports Numba."""

from typing import Any

import numpy as np
from numba.extending import register_jitable

from gradserve_server.devices.host.activations import INLINED
from gradserve_server.devices.host.intrinsics import DONE, count_up, load, read, store, store_at, widen
from gradserve_server.devices.host.lanes import in_all_lanes, last_lanes, load_lanes, num_lanes, sum_of_lanes
from gradserve_server.devices.host.moments import BLOCK_ELEMENTS, merged_mean, moments_of_block


def forward(
    x: Any,
    scale: Any,
    offset: Any,
    epsilon: Any,
    chunk_groups: Any,
    mean: Any,
    rstd: Any,
    y: Any,
    counters: Any,
) -> None:
    """Normalizes each group.

    Args:
        x: T [groups, size], flat.
        scale: U [size].
        offset: U [size].
        epsilon: float64.
        chunk_groups: The number of groups in a chunk.
        mean: U [groups]: a result.
        rstd: U [groups]: a result.
        y: T [groups, size], flat: the result.
        counters: int64 [2], zeros.
    """
    size, groups = len(scale), len(mean)
    num_chunks = -(-groups // chunk_groups)
    chunk = count_up(counters, _TAKEN)
    while chunk < num_chunks:
        for group in range(chunk * chunk_groups, min((chunk + 1) * chunk_groups, groups)):
            first = group * size
            group_mean, squares = _moments(x, first, size)
            r = widen(x, 1 / np.sqrt(squares / size + epsilon))
            _normalize(x, scale, offset, group_mean, r, first, 0, size, y)
            mean[group], rstd[group] = widen(x, group_mean), r
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


@register_jitable(**INLINED)
def _moments(x: Any, first: Any, size: Any) -> Any:
    """Returns the mean of x[first : first + size], and the sum of squared differences from it, both float64."""
    mean, squares = moments_of_block(x, first, min(BLOCK_ELEMENTS, size), True)
    for before in range(BLOCK_ELEMENTS, size, BLOCK_ELEMENTS):
        count = min(BLOCK_ELEMENTS, size - before)
        block_mean, block_squares = moments_of_block(x, first + before, count, True)
        mean, squares = _merged(mean, squares, before, block_mean, block_squares, count)
    return mean, squares


@register_jitable(**INLINED)
def _merged(mean: Any, squares: Any, count: Any, other_mean: Any, other_squares: Any, other_count: Any) -> Any:
    """Returns the moments of two groups of numbers.

    As in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    weight = other_count / (count + other_count)
    delta = other_mean - mean
    merged = squares + (other_squares + weight * count * delta * delta)
    return merged_mean(mean, other_mean, weight), merged


@register_jitable(**INLINED)
def _normalize(x: Any, scale: Any, offset: Any, mean: Any, rstd: Any, first: Any, begin: Any, end: Any, y: Any) -> None:
    """Normalizes the elements from `begin` to `end` of a group, whose first one is x[first]; `mean` is float64."""
    m = widen(x, mean)
    # The rounding error of the mean matters if the deviations are small compared to it.
    rest = widen(x, mean - m)
    for index in range(begin, end):
        normalized = (load(x, first + index) - m - rest) * rstd
        store(y, first + index, normalized * load(scale, index) + load(offset, index))


_TAKEN, _FINISHED = 1, 2
"""The indices of the counters of chunks taken, and of chunks whose sums are complete."""

_BLOCK_GROUPS = 32
"""The number of groups added up in U; these sums are added up in float64, which bounds the error."""


def gradient(
    dy: Any,
    x: Any,
    scale: Any,
    mean: Any,
    rstd: Any,
    chunk_groups: Any,
    partial: Any,
    dx: Any,
    dscale: Any,
    doffset: Any,
    counters: Any,
) -> None:
    """Computes the gradients with respect to x, scale and offset.

    Each chunk has its own sums for scale and offset. The thread that finishes the last chunk adds them up, in the
    order of the chunks.

    Args:
        dy: T [groups, size], flat.
        x: T [groups, size], flat.
        scale: U [size].
        mean: U [groups].
        rstd: U [groups].
        chunk_groups: The number of groups in a chunk.
        partial: float64 [chunks, 2, size]: the sums of chunks.
        dx: T [groups, size], flat: the result.
        dscale: U [size]: the result.
        doffset: U [size]: the result.
        counters: int64 [3], zeros.
    """
    size, groups, num_chunks = len(scale), len(mean), len(partial)
    block_dots, block_totals = np.empty(size, scale.dtype), np.empty(size, scale.dtype)
    chunk = count_up(counters, _TAKEN)
    while chunk < num_chunks:
        chunk_end = min((chunk + 1) * chunk_groups, groups)
        partial[chunk] = 0
        for block_first in range(chunk * chunk_groups, chunk_end, _BLOCK_GROUPS):
            block_dots[:], block_totals[:] = 0, 0
            for group in range(block_first, min(block_first + _BLOCK_GROUPS, chunk_end)):
                m, r = load(mean, group), load(rstd, group)
                _gradient_of_group(dy, x, scale, m, r, group * size, block_dots, block_totals, dx)
            for index in range(size):
                partial[chunk, 0, index] += block_dots[index]
                partial[chunk, 1, index] += block_totals[index]
        if count_up(counters, _FINISHED) == num_chunks - 1:
            for other in range(1, num_chunks):
                for index in range(size):
                    partial[0, 0, index] += partial[other, 0, index]
                    partial[0, 1, index] += partial[other, 1, index]
            for index in range(size):
                dscale[index], doffset[index] = partial[0, 0, index], partial[0, 1, index]
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


@register_jitable(**INLINED)
def _gradient_of_group(
    dy: Any, x: Any, scale: Any, mean: Any, rstd: Any, first: Any, dots: Any, totals: Any, dx: Any
) -> None:
    """Computes dx of a group, and adds the group's terms to the sums for scale and offset."""
    size = len(scale)
    total, dot = _sums(dy, x, scale, mean, rstd, first, 0, size)
    g, n = widen(x, total / size), widen(x, dot / size)
    _gradient_between(dy, x, scale, mean, rstd, g, n, first, 0, size, dots, totals, dx)


@register_jitable(**INLINED)
def _sums(dy: Any, x: Any, scale: Any, mean: Any, rstd: Any, first: Any, begin: Any, end: Any) -> Any:
    """Returns the sums of g and of g n over the elements from `begin` to `end` of a group, both float64."""
    total, dot = 0.0, 0.0
    for start in range(begin, end, BLOCK_ELEMENTS):
        block_total, block_dot = _sums_of_block(
            dy, x, scale, mean, rstd, first + start, start, min(BLOCK_ELEMENTS, end - start)
        )
        total += block_total
        dot += block_dot
    return total, dot


@register_jitable(**INLINED)
def _gradient_between(
    dy: Any,
    x: Any,
    scale: Any,
    mean: Any,
    rstd: Any,
    mean_of_g: Any,
    mean_of_g_n: Any,
    first: Any,
    begin: Any,
    end: Any,
    dots: Any,
    totals: Any,
    dx: Any,
) -> None:
    """Computes dx for the elements from `begin` to `end` of a group, and adds their terms to `dots` and `totals`."""
    for index in range(begin, end):
        gradient, n = load(dy, first + index), (load(x, first + index) - mean) * rstd
        store(dx, first + index, (gradient * load(scale, index) - mean_of_g - n * mean_of_g_n) * rstd)
        store_at(0, dots, index - begin, read(dots, index - begin) + gradient * n)
        store_at(1, totals, index - begin, read(totals, index - begin) + gradient)


@register_jitable(**INLINED)
def _sums_of_block(dy: Any, x: Any, scale: Any, mean: Any, rstd: Any, first: Any, start: Any, size: Any) -> Any:
    """Returns the sums of dy scale and of dy scale (x - mean) rstd, both float64.

    Each difference is multiplied by rstd before it is by dy, so that the products have about the range of dy.

    Args:
        dy: T, flat.
        x: T, flat.
        scale: U.
        mean: The mean of the group.
        rstd: The inverse of its standard deviation.
        first: The index of the first element, in dy and x.
        start: Its index in scale.
        size: The number of elements, from 1 to BLOCK_ELEMENTS.
    """
    lanes = num_lanes(x)
    num_rows = size // lanes
    num_pairs = num_rows // 2
    means, factors = in_all_lanes(mean), in_all_lanes(rstd)
    totals, dots = in_all_lanes(widen(x, 0)), in_all_lanes(widen(x, 0))
    for pair in range(num_pairs):
        at = 2 * pair * lanes
        g = load_lanes(dy, first + at) * load_lanes(scale, start + at)
        p = (load_lanes(x, first + at) - means) * factors
        at += lanes
        h = load_lanes(dy, first + at) * load_lanes(scale, start + at)
        q = (load_lanes(x, first + at) - means) * factors
        totals += g + h
        dots += g * p + h * q
    for row in range(2 * num_pairs, num_rows):
        at = row * lanes
        g = load_lanes(dy, first + at) * load_lanes(scale, start + at)
        totals += g
        dots += g * ((load_lanes(x, first + at) - means) * factors)
    rest = size - num_rows * lanes
    if rest > 0 and num_rows > 0:
        at = size - lanes
        g = load_lanes(dy, first + at) * load_lanes(scale, start + at)
        totals += last_lanes(g, rest)
        dots += last_lanes(g * ((load_lanes(x, first + at) - means) * factors), rest)
    total, dot = sum_of_lanes(totals), sum_of_lanes(dots)
    if num_rows == 0:
        for index in range(size):
            g = load(dy, first + index) * load(scale, start + index)
            total += g
            dot += g * ((load(x, first + index) - mean) * rstd)
    return total, dot


def moments_of_parts(
    x: Any,
    epsilon: Any,
    part_elements: Any,
    partial: Any,
    wide_mean: Any,
    mean: Any,
    rstd: Any,
    counters: Any,
) -> None:
    """Computes the moments of a few long groups, in parts of groups.

    The thread that finishes the last part merges the moments of all, in the order of the parts.

    Args:
        x: T [groups, size], flat.
        epsilon: float64.
        part_elements: The number of elements in a part, a multiple of BLOCK_ELEMENTS.
        partial: float64 [groups, parts, 2]: the moments of parts.
        wide_mean: float64 [groups]: a result.
        mean: U [groups]: a result.
        rstd: U [groups]: a result.
        counters: int64 [3], zeros.
    """
    groups, parts = partial.shape[0], partial.shape[1]
    size, num_chunks = len(x) // groups, groups * parts
    chunk = count_up(counters, _TAKEN)
    while chunk < num_chunks:
        group, part = chunk // parts, chunk % parts
        begin = part * part_elements
        part_mean, squares = _moments(x, group * size + begin, min(part_elements, size - begin))
        partial[group, part, 0], partial[group, part, 1] = part_mean, squares
        if count_up(counters, _FINISHED) == num_chunks - 1:
            for each in range(groups):
                group_mean, group_squares = 0.0, 0.0
                for other in range(parts):
                    before = other * part_elements
                    group_mean, group_squares = _merged(
                        group_mean,
                        group_squares,
                        before,
                        partial[each, other, 0],
                        partial[each, other, 1],
                        min(part_elements, size - before),
                    )
                wide_mean[each], mean[each] = group_mean, widen(x, group_mean)
                rstd[each] = widen(x, 1 / np.sqrt(group_squares / size + epsilon))
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def normalize_parts(
    x: Any,
    scale: Any,
    offset: Any,
    wide_mean: Any,
    rstd: Any,
    part_elements: Any,
    y: Any,
    counters: Any,
) -> None:
    """Normalizes parts of a few long groups, whose moments are known.

    Args:
        x: T [groups, size], flat.
        scale: U [size].
        offset: U [size].
        wide_mean: float64 [groups].
        rstd: U [groups].
        part_elements: The number of elements in a part.
        y: T [groups, size], flat: the result.
        counters: int64 [2], zeros.
    """
    size, groups = len(scale), len(rstd)
    parts = -(-size // part_elements)
    chunk = count_up(counters, _TAKEN)
    while chunk < groups * parts:
        group, part = chunk // parts, chunk % parts
        begin, end = part * part_elements, min((part + 1) * part_elements, size)
        _normalize(x, scale, offset, wide_mean[group], load(rstd, group), group * size, begin, end, y)
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def sums_of_parts(
    dy: Any,
    x: Any,
    scale: Any,
    mean: Any,
    rstd: Any,
    part_elements: Any,
    partial: Any,
    means: Any,
    counters: Any,
) -> None:
    """Computes the means of g and of g n of a few long groups, in parts of groups.

    The thread that finishes the last part adds up the sums of all, in the order of the parts.

    Args:
        dy: T [groups, size], flat.
        x: T [groups, size], flat.
        scale: U [size].
        mean: U [groups].
        rstd: U [groups].
        part_elements: The number of elements in a part, a multiple of BLOCK_ELEMENTS.
        partial: float64 [groups, parts, 2]: the sums of parts.
        means: float64 [groups, 2]: the result.
        counters: int64 [3], zeros.
    """
    groups, parts = partial.shape[0], partial.shape[1]
    size, num_chunks = len(scale), groups * parts
    chunk = count_up(counters, _TAKEN)
    while chunk < num_chunks:
        group, part = chunk // parts, chunk % parts
        begin, end = part * part_elements, min((part + 1) * part_elements, size)
        partial[group, part, 0], partial[group, part, 1] = _sums(
            dy, x, scale, load(mean, group), load(rstd, group), group * size, begin, end
        )
        if count_up(counters, _FINISHED) == num_chunks - 1:
            for each in range(groups):
                total, dot = 0.0, 0.0
                for other in range(parts):
                    total += partial[each, other, 0]
                    dot += partial[each, other, 1]
                means[each, 0], means[each, 1] = total / size, dot / size
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


def gradient_of_parts(
    dy: Any,
    x: Any,
    scale: Any,
    mean: Any,
    rstd: Any,
    means: Any,
    part_elements: Any,
    dx: Any,
    dscale: Any,
    doffset: Any,
    counters: Any,
) -> None:
    """Computes the gradients for parts of a few long groups, each part for all groups.

    Args:
        dy: T [groups, size], flat.
        x: T [groups, size], flat.
        scale: U [size].
        mean: U [groups].
        rstd: U [groups].
        means: float64 [groups, 2]: the means of g and of g n.
        part_elements: The number of elements in a part.
        dx: T [groups, size], flat: the result.
        dscale: U [size]: the result.
        doffset: U [size]: the result.
        counters: int64 [2], zeros.
    """
    size, groups = len(scale), len(mean)
    parts = -(-size // part_elements)
    block_dots, block_totals = np.empty(BLOCK_ELEMENTS, scale.dtype), np.empty(BLOCK_ELEMENTS, scale.dtype)
    dots, totals = np.empty(BLOCK_ELEMENTS), np.empty(BLOCK_ELEMENTS)
    chunk = count_up(counters, _TAKEN)
    while chunk < parts:
        part_end = min((chunk + 1) * part_elements, size)
        for begin in range(chunk * part_elements, part_end, BLOCK_ELEMENTS):
            end = min(begin + BLOCK_ELEMENTS, part_end)
            dots[:], totals[:] = 0, 0
            for block_first in range(0, groups, _BLOCK_GROUPS):
                block_dots[:], block_totals[:] = 0, 0
                for group in range(block_first, min(block_first + _BLOCK_GROUPS, groups)):
                    m, r, first = load(mean, group), load(rstd, group), group * size
                    g, n = widen(x, means[group, 0]), widen(x, means[group, 1])
                    _gradient_between(dy, x, scale, m, r, g, n, first, begin, end, block_dots, block_totals, dx)
                for index in range(end - begin):
                    dots[index] += block_dots[index]
                    totals[index] += block_totals[index]
            for index in range(end - begin):
                dscale[begin + index], doffset[begin + index] = dots[index], totals[index]
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)
