"""Arrays in the memory of a GPU."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve.errors import InternalError
from gradserve.gpu.driver import Gpu, GpuError


@contextmanager
def failures() -> Iterator[None]:
    """Turns GpuError into InternalError."""
    try:
        yield
    except GpuError as error:
        raise InternalError(f"a GPU of this machine fails: {error}") from None


@dataclass(frozen=True, eq=False)
class GpuArray:
    """A C-contiguous array in the memory of a GPU, which belongs to a library in this process.

    Whatever that library has begun to do with it ends before what comes next in the stream of the GPU.

    Attributes:
        gpu: The GPU.
        address: The address of its first element.
        dtype: Its dtype, one that tensors can have.
        shape: Its shape.
        owner: What keeps the memory alive.
    """

    gpu: Gpu
    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    owner: object = field(repr=False)

    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def to_host(self) -> NDArray[Any]:
        """Returns a copy in host memory.

        Raises:
            InternalError: CUDA fails.
        """
        host = np.empty(self.shape, self.dtype)
        if host.nbytes:
            with failures():
                self.gpu.read(self.address, host)
        return host

    def fill(self, values: NDArray[Any]) -> None:
        """Replaces its elements by those of a host array of the same dtype and shape.

        Raises:
            InternalError: CUDA fails.
        """
        if values.nbytes:
            with failures():
                self.gpu.write(self.address, np.ascontiguousarray(values))
