"""Converts arrays to the bytes of a tensor payload, and back."""

from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradserve.wire.dtypes import parse_dtype

Array: TypeAlias = NDArray[Any]


HOST_ARRAYS = (np.ndarray, np.generic)
"""The types of arrays in host memory: some of NumPy's functions return its numbers for arrays without dimensions."""


def wire_array(value: ArrayLike) -> Array:
    """Returns `value` as a little-endian, C-contiguous array of a dtype that tensors can have.

    Copies only if needed.

    Raises:
        TypeError: The dtype has no wire type.
    """
    array = np.asarray(value)
    return np.asarray(array, dtype=parse_dtype(array.dtype), order="C")


class ElsewhereArray(Protocol):
    """An array outside host memory, C-contiguous, of a dtype that tensors can have."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
        ...

    def to_host(self) -> Array:
        """Returns a copy in host memory."""
        ...


AnyArray: TypeAlias = Array | ElsewhereArray
"""An array that can be sent, wherever it is."""


def host_array(array: AnyArray) -> Array:
    """Returns an array in host memory: the array itself if it is there."""
    return array if isinstance(array, HOST_ARRAYS) else array.to_host()


def buffer_of(array: Array) -> memoryview:
    """Returns the bytes of a C-contiguous array without copying them."""
    return array.reshape(-1).view(np.uint8).data
