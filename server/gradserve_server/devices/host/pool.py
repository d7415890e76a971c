"""Reusable host memory.

A fresh large allocation costs a page fault every 4 KiB, more than copying a gradient into it. The pool hands the
same memory out again and again.
"""

import math
import mmap
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MIN_POOLED_BYTES = 1 << 16
_HUGE_PAGE_BYTES = 1 << 21


class _Block(np.ndarray[Any, np.dtype[np.uint8]]):
    """The array at the root of all views of a block; its end is the end of the block's use."""


class BufferPool:
    """Allocates arrays; their memory comes back by itself when the last view of it is gone.

    Safe to use from several threads. Arrays smaller than 64 KiB are ordinary ones.
    """

    def __init__(self, max_idle_bytes: int) -> None:
        """Keeps at most about `max_idle_bytes` of unused memory; more goes back to the system."""
        self._max_idle_bytes = max_idle_bytes
        self._idle: dict[int, deque[mmap.mmap]] = {}
        self._idle_bytes = 0

    @property
    def idle_bytes(self) -> int:
        """Memory that waits to be used again."""
        return self._idle_bytes

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an uninitialised C-contiguous array.

        Raises:
            MemoryError: There is not that much memory.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _MIN_POOLED_BYTES:
            return np.empty(shape, dtype)
        size = _block_size(num_bytes)
        memory = self._reuse(size) or _map(size)
        block = _Block((num_bytes,), np.uint8, memory)
        weakref.finalize(block, self._recycle, memory, size).atexit = False
        return np.ndarray(shape, dtype, block)

    def _reuse(self, size: int) -> mmap.mmap | None:
        try:
            memory = self._idle[size].pop()
        except (KeyError, IndexError):
            return None
        self._idle_bytes -= size
        return memory

    def _recycle(self, memory: mmap.mmap, size: int) -> None:
        # Runs wherever the last view died, so it takes no lock: deques are atomic, and the count, a
        # matter of tidiness, may be off by a block for a moment.
        if self._idle_bytes + size <= self._max_idle_bytes:
            self._idle.setdefault(size, deque()).append(memory)
            self._idle_bytes += size


def _block_size(num_bytes: int) -> int:
    """Rounds up by at most an eighth, so that nearly equal sizes share blocks."""
    step = max(1 << (num_bytes.bit_length() - 4), mmap.PAGESIZE)
    return -(-num_bytes // step) * step


def _map(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot map {size} bytes: {error}") from error
    if size >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
