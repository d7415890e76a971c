"""Reusable memory for large arrays: private, or in regions that a server on this machine reads in place.

A fresh large allocation costs a page fault every 4 KiB, more than copying a gradient into it. So pools reuse memory.
"""

import contextlib
import logging
import math
import mmap
import os
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from math import prod
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.errors import ResourceExhaustedError
from gradserve_protocol.memory.sealed import make_private, make_region

_log = logging.getLogger("gradserve")
_MIN_POOLED_BYTES = 1 << 16
MIN_BYTES = 1 << 16
"""Sending a smaller array is faster than finding its region."""
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


@dataclass(frozen=True, eq=False)
class Region:
    """A region of memory.

    Attributes:
        number: A number that is unique in the process.
        num_bytes: Its size.
        descriptor: Its file descriptor, to hand to a server. Closed when the region is garbage-collected.
        memory: The memory itself.
        address: The address of its first byte.
    """

    number: int
    num_bytes: int
    descriptor: int
    memory: mmap.mmap
    address: int


class RegionPart(NamedTuple):
    """A place in a region."""

    region: Region
    offset: int


class _RegionBlock(np.ndarray[Any, np.dtype[np.uint8]]):
    """The root of all views of a region. Its garbage collection frees the region."""


class RegionPool:
    """Allocates arrays in regions, which return to the pool with the last view.

    Safe to use from several threads.
    """

    def __init__(self, max_idle_bytes: int) -> None:
        self._numbers = count(1)
        self._idle: IdleMemory[Region] = IdleMemory(max_idle_bytes)
        self._starts: list[int] = []
        self._by_start: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()
        self._withdrawn: set[int] = set()
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an uninitialised C-contiguous array; an ordinary one if it is small.

        Raises:
            MemoryError: There is not enough memory.
        """
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes < MIN_BYTES:
            return np.empty(shape, dtype)
        size = block_size(num_bytes)
        region = self._idle.take(size) or self._make(size)
        block = _RegionBlock((region.num_bytes,), np.uint8, region.memory)
        weakref.finalize(block, self._recycle, region).atexit = False
        return np.ndarray(shape, dtype, block)

    def find(self, buffers: Iterable[memoryview]) -> list[RegionPart | None]:
        """Returns the place of each buffer in a region, whatever views the caller has made; None for no region."""
        parts: list[RegionPart | None] = []
        with self._lock:
            for buffer in buffers:
                start = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
                index = bisect_right(self._starts, start) - 1
                region = self._by_start.get(self._starts[index]) if index >= 0 else None
                if region is None or start + len(buffer) > region.address + region.num_bytes:
                    parts.append(None)
                else:
                    parts.append(RegionPart(region, start - region.address))
        return parts

    def withdraw(self, region: Region) -> None:
        """Takes a region back from a server that may still be reading it; the server keeps its present contents.

        Its arrays stay where they are, and become ordinary memory: nobody else sees later writes.
        """
        with self._lock:
            self._withdrawn.add(region.number)
            if self._by_start.get(region.address) is region:
                # First, so that no call lends it with values that are not in its file.
                del self._by_start[region.address]
        try:
            make_private(region.descriptor, region.address, region.num_bytes)
        except MemoryError as error:
            _log.warning("an array of a call that was given up stays shared with the server: %s", error)

    def _make(self, num_bytes: int) -> Region:
        descriptor, memory = make_region(num_bytes, read_only_for_others=False)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        region = Region(next(self._numbers), num_bytes, descriptor, memory, address)
        weakref.finalize(region, os.close, descriptor)
        with self._lock:
            # The system reuses the addresses of regions that are gone.
            self._starts = [start for start in self._starts if start in self._by_start and start != address]
            insort(self._starts, address)
            self._by_start[address] = region
        return region

    def _recycle(self, region: Region) -> None:
        # Runs in whatever thread dropped the last view.
        if region.number in self._withdrawn:
            self._withdrawn.discard(region.number)
        else:
            self._idle.put(region, region.num_bytes)


class ClientMemory:
    """The memory of a client's arrays. Safe to use from several threads.

    Attributes:
        received: Memory for arrays in replies.
        regions: Memory shared with servers; None if the client shares none, or the system cannot.
    """

    def __init__(self, *, shares: bool, kept_bytes: int) -> None:
        """Takes whether to share memory with servers, and the limit of unused memory of each kind."""
        self.received = BufferPool(kept_bytes)
        self.regions = RegionPool(kept_bytes) if shares and hasattr(os, "memfd_create") else None

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an uninitialised array, which a server on this machine reads in place if possible.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        if self.regions is not None:
            # There may be too many open files, or too little memory for regions.
            with contextlib.suppress(MemoryError, ValueError):
                return self.regions.empty(shape, dtype)
        try:
            return np.empty(shape, dtype)
        except (MemoryError, ValueError) as error:
            raise ResourceExhaustedError(f"no memory for shape {list(shape)} of {dtype}: {error}") from None
