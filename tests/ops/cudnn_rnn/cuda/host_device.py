"""Host memory in the place of a GPU's, for a stand-in of cuDNN."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 256


class HostDevice:
    compute_capability = "90"

    def __init__(self) -> None:
        self.blocks = threading.local()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Filled with ones, which are no number that anybody would expect: NaN, or -1."""
        dtype = np.dtype(dtype)
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        memory = np.full(num_bytes + _ALIGNMENT, 0xFF, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + num_bytes].view(dtype).reshape(shape)

    def from_host(self, array: NDArray[Any]) -> NDArray[Any]:
        copy = self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def to_host(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.array(array)

    @contextmanager
    def computing(self) -> Iterator[None]:
        yield

    def address(self, array: NDArray[Any]) -> int:
        return int(array.ctypes.data)

    def stream(self) -> int:
        return threading.get_ident()
