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

    Moments of blocks are combined as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances", 1979.

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
            group_mean, squares = 0.0, 0.0
            for before in range(0, size, BLOCK_ELEMENTS):
                count = min(BLOCK_ELEMENTS, size - before)
                block_mean, block_squares = moments_of_block(x, first + before, count, True)
                weight = count / (before + count)
                delta = block_mean - group_mean
                group_mean = merged_mean(group_mean, block_mean, weight)
                squares += block_squares + weight * before * delta * delta
            m, r = widen(x, group_mean), widen(x, 1 / np.sqrt(squares / size + epsilon))
            # The rounding error of the mean matters if the deviations are small compared to it.
            rest = widen(x, group_mean - m)
            for index in range(size):
                normalized = (load(x, first + index) - m - rest) * r
                store(y, first + index, normalized * load(scale, index) + load(offset, index))
            mean[group], rstd[group] = m, r
        count_up(counters, DONE)
        chunk = count_up(counters, _TAKEN)


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


@register_jitable(fastmath={"contract"})
def _gradient_of_group(
    dy: Any, x: Any, scale: Any, mean: Any, rstd: Any, first: Any, dots: Any, totals: Any, dx: Any
) -> None:
    """Computes dx of a group, and adds the group's terms to the sums for scale and offset."""
    size = len(scale)
    total, dot = 0.0, 0.0
    for start in range(0, size, BLOCK_ELEMENTS):
        block_total, block_dot = _sums_of_block(
            dy, x, scale, mean, rstd, first + start, start, min(BLOCK_ELEMENTS, size - start)
        )
        total += block_total
        dot += block_dot
    mean_of_g = widen(x, total / size)
    mean_of_g_n = widen(x, dot / size)
    for index in range(size):
        gradient, n = load(dy, first + index), (load(x, first + index) - mean) * rstd
        store(dx, first + index, (gradient * load(scale, index) - mean_of_g - n * mean_of_g_n) * rstd)
    for index in range(size):
        gradient, n = load(dy, first + index), (load(x, first + index) - mean) * rstd
        store_at(0, dots, index, read(dots, index) + gradient * n)
        store_at(1, totals, index, read(totals, index) + gradient)


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
