"""The sums of all sparse components of an accumulator."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from gradserve_server.accumulators.gradient import Gradient, SparseSlices
from gradserve_server.accumulators.sparse import SparseSum
from gradserve_server.accumulators.spec import AccumulatorSpec


class SparseSums:
    """The running sums of all sparse components; see `SparseSum`."""

    def __init__(self, spec: AccumulatorSpec) -> None:
        """Takes the spec of the accumulator."""
        self._spec = spec

    @cached_property
    def _sums(self) -> dict[str, SparseSum]:
        """The sums. They are made in the thread that adds the first gradient: it takes long for many."""
        spec = self._spec
        return {each.name: SparseSum(spec.sum_dtype(each), each) for each in spec.components if each.is_sparse}

    @property
    def nbytes(self) -> int:
        """The memory of the sums."""
        return sum([each.nbytes for each in self._sums.values()])

    def growth(self, gradient: Gradient) -> int:
        """Returns the most bytes of the memory quota that adding `gradient` takes."""
        values: Mapping[str, Any] = gradient.values
        return sum(each.growth(values[name]) for name, each in self._sums.items())

    def stage(self, gradient: Gradient, weight: float) -> list[Callable[[], None]]:
        """Prepares an addition; returns the functions that carry it out.

        Raises:
            MemoryError: There is not enough memory.
        """
        if not self._sums:
            return []
        values: Mapping[str, Any] = gradient.values
        with np.errstate(all="ignore"):
            return [each.stage(values[name], weight) for name, each in self._sums.items()]

    def stage_average(self, total_weight: float) -> dict[str, Callable[[], SparseSlices]]:
        """Prepares the end of a round; returns the functions that begin the next and return the results.

        Raises:
            MemoryError: There is not enough memory.
        """
        if not self._sums:
            return {}
        spec = self._spec
        with np.errstate(all="ignore"):
            return {
                name: each.stage_average(spec.by_name[name].dtype, spec.reduction, total_weight)
                for name, each in self._sums.items()
            }
