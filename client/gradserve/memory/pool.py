"""Reusable memory.

A fresh large allocation costs a page fault every 4 KiB, which is more than copying a gradient into it. So the pool
reuses memory.
"""

import math
import mmap
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve.memory.idle import IdleMemory
from gradserve.memory.mapped import MappedArray, MappedMemory

_MIN_POOLED_BYTES = 1 << 16
_HUGE_PAGE_BYTES = 1 << 21


class _Block(MappedArray):
    """The array at the root of all views of a block. When it is garbage-collected, the block is free."""


class BufferPool:
    """Allocates arrays whose memory returns to the pool when the last view of it is gone.

    Safe to use from several threads. Arrays of less than 64 KiB are ordinary ones.
    """

    def __init__(self, max_idle_bytes: int) -> None:
        """Takes the approximate limit of unused memory; more is returned to the system."""
        self._idle: IdleMemory[MappedMemory] = IdleMemory(max_idle_bytes)

    @property
    def idle_bytes(self) -> int:
        """The unused memory in the pool."""
        return self._idle.num_bytes

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an uninitialised C-contiguous array.

        Raises:
            MemoryError: There is not enough memory.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _MIN_POOLED_BYTES:
            return np.empty(shape, dtype)
        size = block_size(num_bytes)
        memory = self._idle.take(size) or _map(size)
        block = _Block.of(memory, num_bytes)
        weakref.finalize(block, self._idle.put, memory, size).atexit = False
        return np.ndarray(shape, dtype, block)


def block_size(num_bytes: int) -> int:
    """Returns a size rounded up by at most an eighth, so that nearly equal sizes share blocks."""
    step = max(1 << (num_bytes.bit_length() - 4), mmap.PAGESIZE)
    return -(-num_bytes // step) * step


def _map(size: int) -> MappedMemory:
    try:
        # Private: by default the memory would be shared with forks of the process, and have no huge pages.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot map {size} bytes: {error}") from error
    if size >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return MappedMemory(memory)
