"""A GPU whose memory is the host's, with allocations as a test likes them."""

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.gpu import Allocation, Gpu, GpuError

STREAM = 0x77


class FakeGpu(Gpu):
    uuid = b"u" * 16
    stream = STREAM

    def __init__(self) -> None:
        self.allocations: dict[int, Allocation] = {}
        self.waited_for: list[int] = []
        self.recorded = 0
        self._ids = 0

    def allocate(self, base: int, num_bytes: int, *, can_be_shared: bool = True) -> None:
        """Makes an allocation, or another one in the place of one that was there."""
        self._ids += 1
        self.allocations[base] = Allocation(base, num_bytes, self._ids, can_be_shared)

    def hold(self, array: NDArray[Any]) -> int:
        """Makes an array an allocation; returns its address."""
        address: int = array.ctypes.data
        self.allocate(address, array.nbytes)
        return address

    def allocation_of(self, address: int) -> Allocation:
        for each in self.allocations.values():
            if each.base <= address < each.base + each.num_bytes:
                return each
        raise GpuError("cuMemGetAddressRange_v2 fails with CUDA_ERROR_INVALID_VALUE (1)")

    def index_of(self, address: int) -> int:
        return 0

    def memory_handle(self, base: int) -> bytes:
        return base.to_bytes(64, "little")

    def new_event(self) -> int:
        return 5

    def event_handle(self, event: int) -> bytes:
        return b"e" * 64

    def record(self, event: int) -> None:
        self.recorded += 1

    def wait_for_stream(self, other: int) -> None:
        self.waited_for.append(other)

    def read(self, address: int, target: Any) -> None:
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    def write(self, address: int, source: Any) -> None:
        ctypes.memmove(address, source.ctypes.data, source.nbytes)


def aligned(size: int, dtype: Any = np.float32) -> NDArray[Any]:
    """Returns an array of 0, 1, 2, ... that begins where a segment can."""
    memory = np.empty(size * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array: NDArray[Any] = memory[start : start + size * np.dtype(dtype).itemsize].view(dtype)
    array[:] = np.arange(size)
    return array
