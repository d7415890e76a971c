"""Converts arrays to the bytes of a tensor payload, and back."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradserve.wire.dtypes import parse_dtype

Array: TypeAlias = NDArray[Any]


def wire_array(value: ArrayLike) -> Array:
    """Returns `value` as a little-endian, C-contiguous array of a dtype that tensors can have.

    Copies only if needed.

    Raises:
        TypeError: The dtype has no wire type.
    """
    array = np.asarray(value)
    return np.asarray(array, dtype=parse_dtype(array.dtype), order="C")


def buffer_of(array: Array) -> memoryview:
    """Returns the bytes of a C-contiguous array without copying them."""
    return array.reshape(-1).view(np.uint8).data
