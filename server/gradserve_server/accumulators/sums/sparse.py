"""Sums of sparse gradients, as in TensorFlow's SparseConditionalAccumulator."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.accumulators.gradient import Array, Gradient, SparseSlices
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec, DType, Reduction

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class _Rows:
    indices: Indices
    values: Array
    weights: NDArray[np.float64]
    """The sum of the weights of the gradients that had the row, for each row."""

    @property
    def nbytes(self) -> int:
        return self.indices.nbytes + self.values.nbytes + self.weights.nbytes


class SparseSum:
    """The running sum of one sparse component, rounded to `dtype` at each addition.

    Gradients are merged as in TensorFlow, with two pointers and without sorting: ascending lists give ascending lists,
    others may keep equal indices as separate rows.

    `stage` and `stage_average` do what can fail, and change nothing; the functions that they return cannot fail.
    """

    def __init__(self, dtype: DType, component: ComponentSpec) -> None:
        self._dtype = dtype
        self._component = component
        self._rows: _Rows | None = None

    @property
    def nbytes(self) -> int:
        """The memory of the sum."""
        return 0 if self._rows is None else self._rows.nbytes

    def growth(self, gradient: SparseSlices) -> int:
        """Returns the most bytes of the memory budget that adding `gradient` takes."""
        row_bytes = 16 + gradient.values[:1].size * self._dtype.itemsize
        return gradient.indices.size * row_bytes

    def stage(self, gradient: SparseSlices, weight: float) -> Callable[[], None]:
        """Prepares an addition; returns the function that carries it out.

        Raises:
            MemoryError: There is not enough memory.
        """
        values = gradient.values.astype(self._dtype, copy=False)
        if weight != 1.0:
            values = np.multiply(values, weight, dtype=self._dtype)
        rows = _Rows(gradient.indices, values, np.full(gradient.indices.size, weight))
        if self._rows is not None:
            rows = _merge(self._rows, rows)

        def commit() -> None:
            self._rows = rows

        return commit

    def stage_average(self, dtype: DType, reduction: Reduction) -> Callable[[], SparseSlices]:
        """Prepares the end of a round; returns the function that begins the next and returns the result in `dtype`.

        Raises:
            MemoryError: There is not enough memory.
        """
        rows = self._rows
        assert rows is not None, "a round that ends has at least one gradient"
        values = rows.values
        if reduction is Reduction.MEAN:
            divisors = rows.weights.astype(self._dtype)
            values = np.divide(values, divisors.reshape(-1, *(1,) * (values.ndim - 1)), dtype=self._dtype)
        values = values.astype(dtype, copy=False).view()
        indices = rows.indices.view()
        values.flags.writeable = indices.flags.writeable = False
        known = self._component.shape.dims
        result = SparseSlices(indices, values, (known[0] if known else -1, *values.shape[1:]))

        def end() -> SparseSlices:
            self._rows = None
            return result

        return end


def _merge(ours: _Rows, theirs: _Rows) -> _Rows:
    where = _merge_ascending if _is_ascending(ours.indices) and _is_ascending(theirs.indices) else _merge_any
    position_ours, position_theirs, count = where(ours.indices, theirs.indices)
    indices = np.empty(count, np.int64)
    values = np.empty((count, *ours.values.shape[1:]), ours.values.dtype)
    weights = np.zeros(count)
    indices[position_ours] = ours.indices
    indices[position_theirs] = theirs.indices
    values[position_theirs] = theirs.values
    both = np.zeros(count, bool)
    both[position_theirs] = True
    shared = both[position_ours]
    alone = position_ours[~shared]
    values[alone] = ours.values[~shared]
    values[position_ours[shared]] += ours.values[shared]
    weights[position_ours] = ours.weights
    weights[position_theirs] += theirs.weights
    return _Rows(indices, values, weights)


def _is_ascending(indices: Indices) -> bool:
    return bool(np.all(indices[:-1] <= indices[1:]))


def _merge_ascending(ours: Indices, theirs: Indices) -> tuple[Indices, Indices, int]:
    """Returns the new position of each row of both lists, and the number of rows after merging.

    The k-th of several equal indices in one list is merged with the k-th in the other, as with two pointers.
    """
    low = np.searchsorted(ours, theirs, "left")
    high = np.searchsorted(ours, theirs, "right")
    repetition = np.arange(theirs.size) - np.searchsorted(theirs, theirs, "left")
    partner = low + repetition
    met = partner < high
    new = ~met
    # A new row of theirs comes after all of ours that are not greater.
    position_ours = np.arange(ours.size) + np.searchsorted(high[new], np.arange(ours.size), "right")
    position_theirs = np.empty(theirs.size, np.int64)
    position_theirs[met] = position_ours[partner[met]]
    position_theirs[new] = high[new] + np.arange(int(new.sum()))
    return position_ours, position_theirs, int(ours.size + new.sum())


def _merge_any(ours: Indices, theirs: Indices) -> tuple[Indices, Indices, int]:
    """Merges lists in any order like `_merge_ascending`, by moving two pointers step by step."""
    left, right = ours.tolist(), theirs.tolist()
    position_ours = np.empty(len(left), np.int64)
    position_theirs = np.empty(len(right), np.int64)
    i = j = count = 0
    while i < len(left) and j < len(right):
        first, second = left[i], right[j]
        if first <= second:
            position_ours[i] = count
            i += 1
        if second <= first:
            position_theirs[j] = count
            j += 1
        count += 1
    rest_ours, rest_theirs = len(left) - i, len(right) - j
    position_ours[i:] = count + np.arange(rest_ours)
    position_theirs[j:] = count + rest_ours + np.arange(rest_theirs)
    return position_ours, position_theirs, count + rest_ours + rest_theirs


class SparseSums:
    """The running sums of all sparse components; see `SparseSum`."""

    def __init__(self, spec: AccumulatorSpec) -> None:
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
        """Returns the most bytes of the memory budget that adding `gradient` takes."""
        values: Mapping[str, Any] = gradient.values
        return sum(each.growth(values[name]) for name, each in self._sums.items())

    def stage(self, gradient: Gradient, weight: float) -> list[Callable[[], None]]:
        """Prepares an addition; returns the functions that carry it out.

        Raises:
            MemoryError: There is not enough memory.
        """
        values: Mapping[str, Any] = gradient.values
        with np.errstate(all="ignore"):
            return [each.stage(values[name], weight) for name, each in self._sums.items()]

    def stage_average(self) -> dict[str, Callable[[], SparseSlices]]:
        """Prepares the end of a round; returns the functions that begin the next and return the results.

        Raises:
            MemoryError: There is not enough memory.
        """
        spec = self._spec
        with np.errstate(all="ignore"):
            return {
                name: each.stage_average(spec.by_name[name].dtype, spec.reduction) for name, each in self._sums.items()
            }
