"""Products of matrices on the host."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import threadpoolctl
from numpy.typing import NDArray

from gradserve_server.devices.host.parallel import ForkJoin
from gradserve_server.devices.host.summation import Summation, multiply

_PART_MULTIPLICATIONS = 1 << 20
"""Some 20 microseconds: for less, no thread is woken up."""


@dataclass(frozen=True)
class Product:
    """out = left right, in float32 or float64.

    Attributes:
        left: [m, k]. Of this and the others, one axis is contiguous.
        right: [k, n].
        out: [m, n]: the result.
        summation: How the k terms of each element are added up.
    """

    left: NDArray[Any]
    right: NDArray[Any]
    out: NDArray[Any]
    summation: Summation = Summation.CHAIN

    def compute(self) -> None:
        """Computes it in this thread."""
        with np.errstate(all="ignore"):  # which every thread has for itself
            multiply(self.left, self.right, self.out, self.summation)

    def parts(self, most: int) -> "Iterator[Product]":
        """Yields products that make up this one, of about equal size and at most so many."""
        rows, columns = self.out.shape
        wanted = min(most, self.out.size * self.left.shape[1] // _PART_MULTIPLICATIONS)
        size = max(-(-max(rows, columns) // max(wanted, 1)), 1)
        # The smaller operand is read whole by every part.
        for first in range(0, max(rows, columns), size):
            part = slice(first, first + size)
            if rows > columns:
                yield replace(self, left=self.left[part], out=self.out[part])
            else:
                yield replace(self, right=self.right[:, part], out=self.out[:, part])


class Products:
    """Products by NumPy's BLAS, cut into parts that several threads take.

    BLAS's own threads wait for each other at every step. Where other work runs beside them, as in a server, one that
    gets no processor for a moment holds up all, and a product may take ten times as long. So let BLAS have one, by
    `use_one_blas_thread`.
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
    """Makes BLAS compute every product in the thread that asks for it.

    For processes of our own only: it changes the whole process.
    """
    threadpoolctl.threadpool_limits(1, user_api="blas")
