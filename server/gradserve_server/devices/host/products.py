"""Products of matrices on the host, and sums of rows.

BLAS adds up the k terms of each element one after another. In float32 the error is up to k 2^-24 of the sum of their
magnitudes; if k is the number of rows of a batch, that is the largest error of a whole call. `Summation` says how the
terms are added instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import numpy as np
import threadpoolctl
from numpy.typing import NDArray

from gradserve_server.devices.compute import checkpoint
from gradserve_server.devices.host.kernels import ForkJoin

_LONGEST_BLOCKS = {1024: 64, 4096: 128}
"""The most terms that BLAS may add one after another, for sums of up to this many terms. BLAS is slower with short
blocks, and over many blocks errors average out."""

_LONGEST_BLOCK = 256
"""The most terms that BLAS may add one after another, for any number of terms."""

_LONGEST_CHAIN = 128
"""The most terms that are not cut into blocks."""

_BLOCK_ROWS = 64
"""Rows that are added up in their own dtype, which takes as long as reading them."""

_TILE_SIDE = 512
"""The longest side of a tile, so that the sums of a few blocks stay in the cache."""

_ELEMENTS_AT_ONCE = 1 << 15
"""The most elements of products whose blocks are multiplied in one call, because a call takes as long as so few."""


_MULTIPLICATIONS_AT_ONCE = 1 << 35
"""The most multiplications between two looks at whether the work was cancelled: a second or two."""

_RESULT_MULTIPLICATIONS = 4096
"""To write an element of the result for the first time takes as long as about so many multiplications."""

_CUT_MULTIPLE = 1152
"""Such products are cut at multiples of this, which are multiples of what BLAS takes at a time."""


class Summation(Enum):
    """The way in which the k terms of each element are added up.

    Attributes:
        CHAIN: As BLAS does, which is fastest.
        BLOCKS: In blocks, whose sums are added in pairs, so that no term takes part in more than 256 + log2(k / 128)
            additions, whatever BLAS does.
        WIDE: In float64, with a single rounding. Takes twice as long as CHAIN.
    """

    CHAIN = auto()
    BLOCKS = auto()
    WIDE = auto()


def multiply(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any], summation: Summation) -> None:
    """Computes out = left right.

    Args:
        left: [m, k], float32 or float64.
        right: [k, n], likewise.
        out: [m, n], likewise; the result.
        summation: The way in which the k terms of each element are added up.

    Raises:
        ServiceError: The work that this thread does was cancelled.
    """
    if summation is Summation.WIDE:
        out[...] = left.astype(np.float64, copy=False) @ right.astype(np.float64, copy=False)
    elif summation is Summation.BLOCKS and left.shape[1] > _LONGEST_CHAIN:
        for rows in _cuts(out.shape[0]):
            for columns in _cuts(out.shape[1]):
                checkpoint()
                _Blocks(left[rows], right[:, columns]).add_up(out[rows, columns])
    else:
        _multiply_at_once(left, right, out)


def _multiply_at_once(left: NDArray[Any], right: NDArray[Any], out: NDArray[Any]) -> None:
    """Computes out = left right by BLAS: in one call, unless that would take a second or more."""
    rows, columns = out.shape
    each = left.shape[1] + _RESULT_MULTIPLICATIONS
    if rows * columns * each <= _MULTIPLICATIONS_AT_ONCE:
        checkpoint()
        np.matmul(left, right, out=out)
        return
    # Rows if possible: BLAS takes them in groups, whose bits do not depend on the others.
    cuts_rows = rows > _CUT_MULTIPLE
    at_once = _MULTIPLICATIONS_AT_ONCE // ((columns if cuts_rows else rows) * each)
    for part in _large_cuts(rows if cuts_rows else columns, max(at_once // _CUT_MULTIPLE, 1) * _CUT_MULTIPLE):
        checkpoint()
        if cuts_rows:
            np.matmul(left[part], right, out=out[part])
        else:
            np.matmul(left, right[:, part], out=out[:, part])


def sum_of_rows(matrix: NDArray[Any]) -> NDArray[np.float64]:
    """Adds up the rows of a matrix: up to 64 rows in its dtype, by BLAS, and their sums in float64."""
    rows, columns = matrix.shape
    num_blocks = rows // _BLOCK_ROWS
    whole, rest = np.split(matrix, [num_blocks * _BLOCK_ROWS])
    ones = np.ones(_BLOCK_ROWS, matrix.dtype)
    blocks = np.matmul(ones, whole.reshape(num_blocks, _BLOCK_ROWS, columns))
    sums: NDArray[np.float64] = blocks.sum(axis=0, dtype=np.float64) + np.matmul(ones[: len(rest)], rest)
    return sums


def _cuts(size: int, side: int = _TILE_SIDE) -> list[slice]:
    return [slice(first, first + side) for first in range(0, size, side)]


def _large_cuts(size: int, side: int) -> list[slice]:
    """Returns cuts of which the last one is not a single row, which BLAS would compute in another way."""
    firsts = range(0, max(size - 1, 1), side)
    return [slice(first, size if first == firsts[-1] else first + side) for first in firsts]


def _block_size(num_terms: int) -> int:
    return next((size for most, size in _LONGEST_BLOCKS.items() if num_terms <= most), _LONGEST_BLOCK)


class _Blocks:
    """A product of matrices with its terms cut into blocks."""

    def __init__(self, left: NDArray[Any], right: NDArray[Any]) -> None:
        self._left = left
        self._right = right
        self._block = _block_size(left.shape[1])
        self._most_at_once = _ELEMENTS_AT_ONCE // (left.shape[0] * right.shape[1])
        self._scratch: list[NDArray[Any]] = []

    def add_up(self, out: NDArray[Any]) -> None:
        """Computes the product."""
        self._add_up(0, self._left.shape[1], out, 0)

    def _add_up(self, begin: int, end: int, out: NDArray[Any], depth: int) -> None:
        """Adds up the terms from `begin`, the beginning of a block, to `end`."""
        num_blocks = -(-(end - begin) // self._block)
        if num_blocks == 1:
            np.matmul(self._left[:, begin:end], self._right[begin:end], out=out)
        elif num_blocks <= self._most_at_once:
            self._add_up_at_once(begin, end, out)
        else:
            middle = begin + num_blocks // 2 * self._block
            if len(self._scratch) == depth:
                self._scratch.append(np.empty(out.shape, out.dtype))
            self._add_up(begin, middle, out, depth + 1)
            self._add_up(middle, end, self._scratch[depth], depth + 1)
            np.add(out, self._scratch[depth], out=out)

    def _add_up_at_once(self, begin: int, end: int, out: NDArray[Any]) -> None:
        num_blocks = (end - begin) // self._block
        last = begin + num_blocks * self._block
        left = self._left[:, begin:last].T.reshape(num_blocks, self._block, -1).transpose(0, 2, 1)
        sums = np.matmul(left, self._right[begin:last].reshape(num_blocks, self._block, -1))
        while len(sums) > 1:
            half = len(sums) // 2
            np.add(sums[:half], sums[-half:], out=sums[:half])
            sums = sums[: len(sums) - half]
        if last < end:
            sums[0] += np.matmul(self._left[:, last:end], self._right[last:end])
        out[...] = sums[0]


_PART_MULTIPLICATIONS = 1 << 20
"""The least work for a part: some 20 microseconds. For less, no thread is woken up."""


@dataclass(frozen=True)
class Product:
    """out = left right, in float32 or float64.

    Attributes:
        left: [m, k]. In this and the others, one axis is contiguous.
        right: [k, n].
        out: [m, n], the result.
        summation: The way in which the k terms of each element are added up.
    """

    left: NDArray[Any]
    right: NDArray[Any]
    out: NDArray[Any]
    summation: Summation = Summation.CHAIN

    def compute(self) -> None:
        """Computes the product in this thread."""
        with np.errstate(all="ignore"):  # which is set per thread
            multiply(self.left, self.right, self.out, self.summation)

    def parts(self, most: int) -> "Iterator[Product]":
        """Yields at most this many products of about equal size, which make up this one."""
        rows, columns = self.out.shape
        wanted = min(most, self.out.size * self.left.shape[1] // _PART_MULTIPLICATIONS)
        size = max(-(-max(rows, columns) // max(wanted, 1)), 1)
        # Every part reads the whole smaller operand.
        for first in range(0, max(rows, columns), size):
            part = slice(first, first + size)
            if rows > columns:
                yield replace(self, left=self.left[part], out=self.out[part])
            else:
                yield replace(self, right=self.right[:, part], out=self.out[:, part])


class Products:
    """Products by NumPy's BLAS, cut into parts for several threads.

    BLAS's own threads wait for each other at every step. If other work runs beside them, as in a server, one that gets
    no processor for a moment holds up all, and a product may take ten times as long. So restrict BLAS to one thread
    with `use_one_blas_thread`.
    """

    def __init__(self, parallel: ForkJoin) -> None:
        self._parallel = parallel

    def compute(self, *products: Product) -> None:
        """Computes products that do not depend on each other.

        Raises:
            MemoryError: BLAS got no memory.
        """
        parts = [part for product in products for part in product.parts(self._parallel.num_threads)]
        self._parallel.run_all([part.compute for part in parts])


def use_one_blas_thread() -> None:
    """Makes BLAS compute every product in the calling thread.

    Only for processes of our own, because it changes the whole process.
    """
    threadpoolctl.threadpool_limits(1, user_api="blas")
