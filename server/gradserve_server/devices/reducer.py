"""The interface of what adds up and divides lists of arrays, wherever they are."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from gradserve_server.devices.device import Array
from gradserve_server.devices.host.reduction.finite import Place


class Reducer(Protocol):
    """Scales, adds and divides lists of C-contiguous arrays of one memory. Safe to use from several threads.

    Every operation on every element is rounded by itself, in the dtype of sums, so that all implementations give the
    same bits; only those of a NaN may differ. Methods return when the results are there.
    """

    def make_ready(self, dtypes: Iterable[tuple[np.dtype[Any], np.dtype[Any]]]) -> None:
        """Does what might fail when gradients are added to sums, given the dtypes of both."""
        ...

    def scale(self, sources: Sequence[Array], factor: float, outs: Sequence[Array]) -> None:
        """Computes out = source factor for each; an `out` is either its `source` itself or other memory."""
        ...

    def add_scaled(self, totals: Sequence[Array], sources: Sequence[Array], factor: float) -> None:
        """Computes total += source factor for each."""
        ...

    def divide(self, totals: Sequence[Array], divisor: float, outs: Sequence[Array]) -> None:
        """Computes out = total / divisor for each, rounded to the dtype of `out` at the end."""
        ...

    def add_and_divide(
        self,
        totals: Sequence[Array],
        sources: Sequence[Array],
        factor: float,
        divisor: float,
        outs: Sequence[Array],
    ) -> None:
        """Computes out = (total + source factor) / divisor for each. The totals may be changed."""
        ...

    def needs_totals(self, num_gradients: int) -> bool:
        """Returns True if `add_up` of so many gradients needs memory for their sums."""
        ...

    def add_up(
        self,
        gradients: Sequence[Sequence[Array]],
        factors: Sequence[float],
        divisor: float,
        dtypes: Sequence[np.dtype[Any]],
        totals: Sequence[Array] | None,
        outs: Sequence[Array],
    ) -> None:
        """Computes out = (first gradient * its factor + second gradient * its factor + ...) / divisor, in this order.

        Args:
            gradients: The lists of arrays to add, at least one.
            factors: The factor of each list.
            divisor: The divisor.
            dtypes: The dtypes of the sums.
            totals: Memory for the sums, None if `needs_totals` says so.
            outs: The results; each is either its `total` itself or other memory.
        """
        ...

    def first_non_finite(self, arrays: Sequence[Array]) -> Place | None:
        """Returns the place of the first value that is infinite or NaN, None if all are finite."""
        ...
