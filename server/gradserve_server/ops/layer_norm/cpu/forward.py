"""The loop of LayerNorm; see `kernels`."""

from typing import Any

import numpy as np

from gradserve_server.devices.host.intrinsics import DONE, count_up, load, store, widen
from gradserve_server.devices.host.moments import BLOCK_ELEMENTS, merged_mean, moments_of_block

_TAKEN = 1
"""The index of the counter of chunks taken."""


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
