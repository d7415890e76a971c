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
