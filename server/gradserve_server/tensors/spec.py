"""Element type and shape of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and shape of a tensor."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @cached_property
    def num_bytes(self) -> int:
        """The size of the elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


def num_bytes_of(specs: Sequence[TensorSpec]) -> int:
    """Returns the size of the elements of all tensors. For very many it takes long."""
    return sum([spec.num_bytes for spec in specs])
