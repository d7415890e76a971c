"""Pinned host memory."""

import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import Any

from tests.devices.cuda.stand_in.gpu.errors import OUT_OF_MEMORY, CUDARuntimeError

from .._machine import MACHINE
from . import runtime

_UNIT = 512


class PinnedMemory:
    """An allocation of pinned memory."""

    def __init__(self, size: int, flags: int = 0) -> None:
        self.size = size
        self.ptr = runtime.hostAlloc(size, flags) if size > 0 else 0

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):
            runtime.freeHost(self.ptr)


class PinnedMemoryPointer:
    """An address in pinned memory. It has the buffer protocol, for which each is an array of ctypes, too."""

    mem: Any
    ptr: int

    def __new__(cls, mem: Any, offset: int) -> "PinnedMemoryPointer":
        made: PinnedMemoryPointer = _with_buffer(mem.size - offset).from_address(mem.ptr + offset)
        made.mem, made.ptr = mem, mem.ptr + offset
        return made

    def __init__(self, mem: Any, offset: int) -> None:
        """Does nothing: what ctypes would do here is done."""

    def __int__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> "PinnedMemoryPointer":
        return PinnedMemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def size(self) -> int:
        size: int = self.mem.size - (self.ptr - self.mem.ptr)
        return size


@functools.cache
def _with_buffer(size: int) -> Any:
    return type("PinnedMemoryPointer", (PinnedMemoryPointer, ctypes.c_uint8 * size), {})


class PooledPinnedMemory:
    """A block of a pool, which gets it back at the end."""

    def __init__(self, mem: PinnedMemory, pool: "weakref.ReferenceType[PinnedMemoryPool]") -> None:
        self.ptr, self.size, self.mem, self.pool = mem.ptr, mem.size, mem, pool

    def free(self) -> None:
        pool = self.pool()
        if pool is not None and self.ptr:
            pool.free(self.mem, self.size)
        self.ptr = self.size = 0

    __del__ = free


class PinnedMemoryPool:
    """Blocks of pinned memory for use again."""

    def __init__(self, allocator: "Callable[[int], PinnedMemoryPointer] | None" = None) -> None:
        self._allocator = allocator if allocator is not None else _malloc
        self._free: dict[int, list[PinnedMemory]] = {}
        self._weak = weakref.ref(self)

    def malloc(self, size: int) -> PinnedMemoryPointer:
        if size == 0:
            return PinnedMemoryPointer(PinnedMemory(0), 0)
        size = 1 << (-(-size // _UNIT) * _UNIT - 1).bit_length()
        free = self._free.get(size)
        mem = free.pop() if free else self._new(size)
        return PinnedMemoryPointer(PooledPinnedMemory(mem, self._weak), 0)

    def _new(self, size: int) -> PinnedMemory:
        try:
            mem: PinnedMemory = self._allocator(size).mem
        except CUDARuntimeError as error:
            if error.status != OUT_OF_MEMORY:
                raise
            self.free_all_blocks()
            mem = self._allocator(size).mem
        return mem

    def free(self, mem: PinnedMemory, size: int) -> None:
        MACHINE.check_reuse(mem.ptr)
        self._free.setdefault(size, []).append(mem)

    def free_all_blocks(self) -> None:
        self._free.clear()

    def n_free_blocks(self) -> int:
        return sum(map(len, self._free.values()))


def _malloc(size: int) -> PinnedMemoryPointer:
    return PinnedMemoryPointer(PinnedMemory(size, runtime.hostAllocPortable), 0)


_default_pool = PinnedMemoryPool()
_current: list[Callable[[int], PinnedMemoryPointer]] = [_default_pool.malloc]


def alloc_pinned_memory(size: int) -> PinnedMemoryPointer:
    return _current[0](size)


def set_pinned_memory_allocator(allocator: Callable[[int], PinnedMemoryPointer] | None = None) -> None:
    _current[0] = allocator if allocator is not None else _malloc


def is_memory_pinned(data: int) -> bool:
    return MACHINE.host.at(data) is not None
