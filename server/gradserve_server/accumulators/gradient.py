"""What goes into an accumulator and what comes out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class SparseSlices:
    """Rows of a larger tensor, as TensorFlow's IndexedSlices.

    Attributes:
        indices: Row numbers, int64.
        values: The rows.
        dense_shape: Of the whole tensor; -1 where unknown; None when not given.
    """

    indices: NDArray[np.int64]
    values: Array
    dense_shape: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Memory of both arrays."""
        return self.indices.nbytes + self.values.nbytes


Value: TypeAlias = Array | SparseSlices

_MERGE_WORK = 64
"""The work of adding a byte of sparse values, in bytes of dense ones."""


@dataclass(frozen=True)
class Gradient:
    """A value for every component, by name.

    Attributes:
        values: Arrays that nobody changes, except the accumulator where `owned`.
        owned: The accumulator may take over the memory of the arrays.
    """

    values: Mapping[str, Value]
    owned: bool = False

    @property
    def nbytes(self) -> int:
        """Memory of all values."""
        return sum(value.nbytes for value in self.values.values())

    @property
    def sparse_work(self) -> int:
        """The bytes of dense values that take as long to add as the sparse ones: merging takes many times as long."""
        return _MERGE_WORK * self.sparse_nbytes

    @property
    def dense_nbytes(self) -> int:
        """Memory of the dense values."""
        return self.nbytes - self.sparse_nbytes

    @property
    def sparse_nbytes(self) -> int:
        """Memory of the sparse values, whose indices have to be looked at one by one."""
        return sum(value.nbytes for value in self.values.values() if isinstance(value, SparseSlices))


@dataclass(frozen=True)
class Contribution:
    """Who sent a gradient, and what it counts.

    Attributes:
        local_step: The step at which the worker computed it.
        weight: What it counts.
        worker_id: Who sent it; may be empty.
        sequence: Orders the gradients of one worker.
    """

    local_step: int = 0
    weight: float = 1.0
    worker_id: str = ""
    sequence: int = 0


@dataclass(frozen=True)
class Average:
    """The result of a round.

    Attributes:
        values: By component, in the order of the spec. Read-only arrays.
        step: The global_step the round led to.
        round_number: Of the round.
        num_gradients: How many are in it.
        total_weight: The sum of their weights.
        worker_ids: Who sent them, each once, in order of arrival.
    """

    values: Mapping[str, Value]
    step: int
    round_number: int
    num_gradients: int
    total_weight: float
    worker_ids: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Memory of all values."""
        return sum(value.nbytes for value in self.values.values())

    @property
    def arrays(self) -> list[Array]:
        """All arrays, in the order of the components; of a sparse one indices and values."""
        arrays: list[Array] = []
        for value in self.values.values():
            arrays += [value.indices, value.values] if isinstance(value, SparseSlices) else [value]
        return arrays
