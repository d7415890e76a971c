"""Squared norms, distances and products of the updates of a round, for one component at a time.

Servers of sharded parameters compute these for their own components and exchange them: `total` adds the numbers of all
components, in the order of the spec.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
"""An array of float16, bfloat16, float32 or float64, C-contiguous."""
T = TypeVar("T")
R = TypeVar("R")

BLOCK = 1 << 16
"""The elements of an update whose squares are added before those of the next block: the sums depend on it."""


class Parallel(Protocol):
    """Calls a function for each of some arguments; returns the results in their order, as `map` does."""

    def __call__(self, function: Callable[[T], R], arguments: Iterable[T], /) -> Iterable[R]: ...


def squared_norms(arrays: Sequence[Array | None], parallel: Parallel = map) -> list[float]:
    """Returns the sums of squares of a component, one for each update; 0 for one that lacks it."""
    present = [index for index, array in enumerate(arrays) if array is not None]

    def of_block(start: int) -> list[float]:
        rows = load([array for array in arrays if array is not None], start)
        rows *= rows
        return row_sums(rows)

    found = _sum_of_blocks(of_block, arrays, len(present), parallel)
    sums = [0.0] * len(arrays)
    for index, value in zip(present, found, strict=True):
        sums[index] = value
    return sums


def squared_distances(
    arrays: Sequence[Array], scales: Sequence[float] | None = None, parallel: Parallel = map
) -> list[float]:
    """Returns the squared distances of updates in a component, by direct differences.

    Args:
        arrays: The component, in each update.
        scales: Factors of the updates; None for 1.
        parallel: Runs blocks, perhaps in threads.

    Returns:
        One number for each pair of updates: 0 and 1, 0 and 2, ..., 1 and 2, ...
    """
    num_pairs = len(arrays) * (len(arrays) - 1) // 2

    def of_block(start: int) -> list[float]:
        rows = load(arrays, start, scales)
        sums: list[float] = []
        for index in range(len(rows) - 1):
            differences = rows[index + 1 :] - rows[index]
            differences *= differences
            sums += row_sums(differences)
        return sums

    return _sum_of_blocks(of_block, arrays, num_pairs, parallel)


def products(
    arrays: Sequence[Array | None], reduced: Array | None, parallel: Parallel = map
) -> tuple[list[float], list[float]]:
    """Returns the products of updates with the reduced one in a component, and the sums of squares of the latter.

    Both have one number for each update, which is 0 for one that lacks the component.
    """
    dots, squares = [0.0] * len(arrays), [0.0] * len(arrays)
    present = [index for index, array in enumerate(arrays) if array is not None]
    if reduced is None or not present:
        return dots, squares

    def of_block(start: int) -> list[float]:
        rows = load([*(array for array in arrays if array is not None), reduced], start)
        rows[:-1] *= rows[-1]
        rows[-1] *= rows[-1]
        return row_sums(rows)

    *found, square = _sum_of_blocks(of_block, [reduced], len(present) + 1, parallel)
    for index, value in zip(present, found, strict=True):
        dots[index], squares[index] = value, square
    return dots, squares


def total(numbers: Iterable[Sequence[float]]) -> list[float]:
    """Adds numbers of components, or of blocks, in their order.

    Not by `sum`, which compensates rounding from Python 3.12 on.
    """
    totals: list[float] = []
    for each in numbers:
        totals = [before + value for before, value in zip(totals, each, strict=True)] if totals else list(each)
    return totals


def load(arrays: Sequence[Array], start: int, scales: Sequence[float] | None = None) -> NDArray[np.float64]:
    """Returns a block of a component in float64, with a row for each update."""
    stop = min(start + BLOCK, arrays[0].size)
    rows = np.empty((len(arrays), stop - start))
    for row, array, scale in zip(rows, arrays, repeat(1.0) if scales is None else scales, strict=False):
        row[:] = array.reshape(-1)[start:stop]
        if scale != 1:
            row *= scale
    return rows


def row_sums(rows: NDArray[np.float64]) -> list[float]:
    """Returns the sum of each row, by adding its halves to each other until one element is left. Changes the rows.

    NumPy's own sums may add in another order with another version or processor.
    """
    width = rows.shape[1]
    while width > 1:
        half = (width + 1) // 2
        rows[:, : width - half] += rows[:, half:width]
        width = half
    sums: list[float] = rows[:, 0].tolist()
    return sums


def _sum_of_blocks(
    of_block: Callable[[int], list[float]], arrays: Sequence[Array | None], num_sums: int, parallel: Parallel
) -> list[float]:
    size = next((array.size for array in arrays if array is not None), 0)
    if not size or not num_sums:
        return [0.0] * num_sums

    def quietly(start: int) -> list[float]:
        with np.errstate(all="ignore"):  # what is not finite is dropped later
            return of_block(start)

    return total(parallel(quietly, range(0, size, BLOCK)))
