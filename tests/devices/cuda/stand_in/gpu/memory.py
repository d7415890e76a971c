"""The memory of a GPU."""

import ctypes
import mmap
import os
import secrets

import numpy as np
from numpy.typing import NDArray

from tests.devices.cuda.stand_in.gpu.errors import OUT_OF_MEMORY, CUDARuntimeError
from tests.devices.cuda.stand_in.gpu.ranges import POISON, Allocation, Ranges, bytes_at

PAGE = mmap.PAGESIZE
ROOM = 4
"""So many times as many addresses as bytes: there is no fragmentation, as addresses are mapped to any pages."""


class DeviceMemory:
    """Memory of one GPU: what cudaMalloc gives.

    Other processes can map it. A page before each allocation has a token as long as it is allocated. What is around
    allocations is poisoned, so overruns are seen when they are freed.
    """

    def __init__(self, index: int, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.file = os.memfd_create(f"stand-in-gpu-{index}")
        self._size = ROOM * total_bytes
        os.ftruncate(self.file, self._size)
        self._map = mmap.mmap(self.file, self._size)
        self._base = address_of(self._map)
        self._free: list[tuple[int, int]] = [(self._base, self._base + self._size)]

    def malloc(self, num_bytes: int) -> Allocation:
        """Returns poisoned memory.

        Raises:
            CUDARuntimeError: There is not enough.
        """
        if num_bytes > self.total_bytes - self.used_bytes:
            raise CUDARuntimeError(OUT_OF_MEMORY)
        needed = 2 * PAGE + -(-num_bytes // PAGE) * PAGE
        found = next((place for place, (start, end) in enumerate(self._free) if end - start >= needed), None)
        if found is None:
            raise CUDARuntimeError(OUT_OF_MEMORY)
        start, end = self._free[found]
        self._free[found : found + 1] = [(start + needed, end)] if end - start > needed else []
        self.used_bytes += num_bytes
        bytes_at(start, needed)[...] = POISON
        bytes_at(start, 16)[...] = memoryview(secrets.token_bytes(16))
        allocation = Allocation(start + PAGE, num_bytes, "device")
        allocation.blocks[allocation.start] = num_bytes
        return allocation

    def free(self, allocation: Allocation) -> bool:
        """Frees memory; returns False if something was written around it."""
        start, num_bytes = allocation.start - PAGE, allocation.num_bytes
        needed = 2 * PAGE + -(-num_bytes // PAGE) * PAGE
        is_whole = bool(
            (bytes_at(start + 16, PAGE - 16) == POISON).all()
            and (bytes_at(allocation.end, start + needed - allocation.end) == POISON).all()
        )
        self._map.madvise(mmap.MADV_REMOVE, start - self._base, needed)
        self.used_bytes -= num_bytes
        self._free = _merged([*self._free, (start, start + needed)])
        return is_whole

    def has(self, address: int) -> bool:
        """Returns True if an address is in this memory."""
        return self._base <= address < self._base + self._size

    def has_any(self, numbers: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Returns which of some numbers are addresses in this memory."""
        return (numbers >= self._base) & (numbers < self._base + self._size)

    def handle(self, allocation: Allocation) -> tuple[int, bytes]:
        """Returns where in the file an allocation is, and its token."""
        header = allocation.start - PAGE
        return header - self._base, bytes(bytes_at(header, 16))

    def close(self) -> None:
        os.close(self.file)
        # The mapping goes with its last view.


class HostMemory(Ranges[Allocation]):
    """The pinned memory of a process."""

    def __init__(self) -> None:
        super().__init__()
        self._maps: dict[int, mmap.mmap] = {}

    def allocate(self, num_bytes: int) -> Allocation:
        """Returns poisoned pinned memory."""
        memory = mmap.mmap(-1, max(num_bytes, 1))
        allocation = Allocation(address_of(memory), num_bytes, "pinned", {address_of(memory): num_bytes})
        self._maps[allocation.start] = memory
        bytes_at(allocation.start, num_bytes)[...] = POISON
        self.add(allocation)
        return allocation

    def free(self, allocation: Allocation) -> None:
        bytes_at(allocation.start, allocation.num_bytes)[...] = POISON
        self.remove(allocation)
        del self._maps[allocation.start]

    def is_allocated(self, allocation: Allocation) -> bool:
        """Returns True if memory was allocated here, False if it is another's and only registered."""
        return allocation.start in self._maps


def address_of(memory: mmap.mmap) -> int:
    """Returns where memory is mapped."""
    return ctypes.addressof(ctypes.c_uint8.from_buffer(memory))


def _merged(free: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(free):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
