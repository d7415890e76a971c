"""Reusable memory for large arrays.

A fresh large allocation costs a page fault every 4 KiB, more than copying a gradient into it. So the pool reuses
memory.
"""

import math
import mmap
import weakref
from collections import deque
from functools import lru_cache
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

_MIN_POOLED_BYTES = 1 << 16
_HUGE_PAGE_BYTES = 1 << 21
MemoryT = TypeVar("MemoryT")


class IdleMemory(Generic[MemoryT]):
    """Unused pieces of memory, by size.

    Safe to use from several threads. It takes no lock, because finalizers use it, which run in any thread: deques are
    atomic, and the count may be off by a piece for a moment.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: dict[int, deque[MemoryT]] = {}
        self.num_bytes = 0
        """The total size of the pieces."""

    def take(self, num_bytes: int) -> MemoryT | None:
        """Returns the most recently used piece of this size, or None."""
        try:
            piece = self._pieces[num_bytes].pop()
        except (KeyError, IndexError):
            return None
        self.num_bytes -= num_bytes
        return piece

    def put(self, piece: MemoryT, num_bytes: int) -> None:
        """Keeps a piece, unless that would exceed the limit."""
        if self.num_bytes + num_bytes <= self._max_bytes:
            self._pieces.setdefault(num_bytes, deque()).append(piece)
            self.num_bytes += num_bytes


class MappedMemory:
    """A memory map with an identity: it can be a weak key, so users of its memory learn when it is gone.

    Attributes:
        map: The map. A reference to it keeps the memory alive; nobody holds one longer than this object lives, except
            to return the memory first.
        address: The address of its first byte.
        num_bytes: Its size.
        is_writable: Whether this process can write to it.
    """

    __slots__ = ("__weakref__", "address", "is_writable", "map", "num_bytes")

    def __init__(self, memory: mmap.mmap) -> None:
        view = np.frombuffer(memory, np.uint8)
        self.map = memory
        self.address: int = view.ctypes.data
        self.num_bytes = view.size
        self.is_writable = view.flags.writeable


class MappedArray(np.ndarray[Any, np.dtype[np.uint8]]):
    """The array at the root of all arrays in a map."""

    memory: MappedMemory

    @classmethod
    def of(cls, memory: MappedMemory, num_bytes: int) -> Self:
        """Returns the first bytes of a map."""
        array = cls((num_bytes,), np.uint8, memory.map)
        array.memory = memory
        return array


def memory_of(array: NDArray[Any]) -> MappedMemory | None:
    """Returns the map that contains an array, through any number of views; None if it is in none of ours."""
    part: Any = array
    while True:
        if isinstance(part, MappedArray) and hasattr(part, "memory"):
            return part.memory
        if isinstance(part, np.ndarray):
            part = part.base
        elif isinstance(part, memoryview):
            part = part.obj
        else:
            return None


class _Block(MappedArray):
    """The root of all views of a block. Its garbage collection frees the block."""


class BufferPool:
    """Allocates arrays whose memory returns to the pool with their last view.

    Safe to use from several threads. Arrays of less than 64 KiB are ordinary ones.
    """

    def __init__(self, max_idle_bytes: int) -> None:
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
        block = _Block((num_bytes,), np.uint8, memory.map)
        block.memory = memory
        weakref.finalize(block, self._idle.put, memory, size).atexit = False
        return np.ndarray(shape, dtype, block)


@lru_cache(maxsize=1024)
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
