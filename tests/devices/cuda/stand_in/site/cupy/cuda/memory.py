"""Memory of a GPU: allocations, pointers, and pools with an arena for each stream."""

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.devices.cuda.stand_in.gpu.errors import OUT_OF_MEMORY, CUDARuntimeError
from tests.devices.cuda.stand_in.gpu.ranges import POISON, Access, Allocation, bytes_at

from .._machine import MACHINE
from . import runtime
from .device import Device
from .stream import get_current_stream

_UNIT = 512
_GUARD = 512
"""Bytes behind each block of a pool. They do not count as a part of it, so pools count as CuPy's."""


class OutOfMemoryError(MemoryError):
    """There is not enough memory for an allocation from a pool."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        message = f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes"
        super().__init__(message + (f", limit set to: {limit:,} bytes)." if limit else ")."))


class BaseMemory:
    """Memory of a GPU."""

    ptr: int = 0
    size: int = 0
    device_id: int = -1

    @property
    def device(self) -> Device:
        return Device(self.device_id)


class Memory(BaseMemory):
    """An allocation of cudaMalloc."""

    is_pooled = False

    def __init__(self, size: int) -> None:
        self.size = size
        self.device_id = runtime.getDevice()
        self.ptr = 0
        if size > 0:
            self.ptr = runtime.malloc(size)

    def __del__(self) -> None:
        if self.ptr:
            MACHINE.free(self.ptr, is_pooled=self.is_pooled)


class UnownedMemory(BaseMemory):
    """Memory of another owner, who is kept alive."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self._owner = ptr, size, owner
        if device_id < 0:
            device_id = runtime.pointerGetAttributes(ptr).device
        if device_id < 0:
            raise RuntimeError("the memory is not a GPU's")
        self.device_id = device_id


class MemoryPointer:
    """An address in memory."""

    def __init__(self, mem: BaseMemory, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset
        self.device_id = mem.device_id

    @property
    def device(self) -> Device:
        return Device(self.device_id)

    def __int__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> "MemoryPointer":
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def copy_from_device(self, src: "MemoryPointer", size: int) -> None:
        runtime.memcpy(self.ptr, src.ptr, size, runtime.memcpyDeviceToDevice)

    def copy_from_device_async(self, src: "MemoryPointer", size: int, stream: Any = None) -> None:
        runtime.memcpyAsync(self.ptr, src.ptr, size, runtime.memcpyDeviceToDevice, _ptr(stream))

    def copy_from_host(self, mem: Any, size: int) -> None:
        runtime.memcpy(self.ptr, _address(mem), size, runtime.memcpyHostToDevice)

    def copy_from_host_async(self, mem: Any, size: int, stream: Any = None) -> None:
        if size:
            runtime.memcpyAsync(self.ptr, _address(mem), size, runtime.memcpyHostToDevice, _ptr(stream))

    def copy_to_host(self, mem: Any, size: int) -> None:
        runtime.memcpy(_address(mem), self.ptr, size, runtime.memcpyDeviceToHost)

    def copy_to_host_async(self, mem: Any, size: int, stream: Any = None) -> None:
        if size:
            runtime.memcpyAsync(_address(mem), self.ptr, size, runtime.memcpyDeviceToHost, _ptr(stream))

    def memset(self, value: int, size: int) -> None:
        runtime.memset(self.ptr, value, size)

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        if size:
            runtime.memsetAsync(self.ptr, value, size, _ptr(stream))


def _ptr(stream: Any) -> int:
    ptr: int = get_current_stream().ptr if stream is None else stream.ptr
    return ptr


def _address(mem: Any) -> int:
    address: int = mem if isinstance(mem, int) else mem.value
    return address


@dataclass(eq=False)
class _Chunk:
    """A part of an allocation, of `size` bytes and a guard; `next` and `before` are its neighbours."""

    memory: Memory
    allocation: Allocation
    ptr: int
    size: int
    stream: int
    before: "_Chunk | None" = None
    next: "_Chunk | None" = None
    is_used: bool = False


class PooledMemory(BaseMemory):
    """A chunk of a pool, which gets it back at the end."""

    def __init__(self, chunk: _Chunk, pool: "weakref.ReferenceType[SingleDeviceMemoryPool]") -> None:
        self._chunk: _Chunk | None = chunk
        self._pool = pool
        self.ptr, self.size, self.device_id = chunk.ptr, chunk.size, chunk.memory.device_id

    def free(self) -> None:
        """Gives the memory back."""
        chunk, pool, self._chunk = self._chunk, self._pool(), None
        if chunk is not None and pool is not None and not MACHINE.is_closed:
            pool.free(chunk)

    __del__ = free


class SingleDeviceMemoryPool:
    """The pool of one GPU: best fit, split and merged, in an arena for each stream.

    What is freed goes back to the arena from which it came, while work of other streams may still use it: the stream of
    the arena writes poison there at once, which is a fault unless it surely comes after that work.
    """

    def __init__(self, allocator: Callable[[int], MemoryPointer] | None = None) -> None:
        self._allocator = allocator if allocator is not None else _malloc
        self._arenas: dict[int, list[_Chunk]] = {}
        self._later: list[_Chunk] = []
        self._memories: set[Memory] = set()  # so that none ends as a part of a cycle before its chunk is back
        self._total = self._used = self._limit = 0
        self._weak = weakref.ref(self)

    def malloc(self, size: int) -> MemoryPointer:
        size = -(-size // _UNIT) * _UNIT
        if size == 0:
            return MemoryPointer(Memory(0), 0)
        stream = get_current_stream().ptr
        queue = MACHINE.queue(stream)
        with MACHINE.scheduler.lock:
            self._tidy()
            chunk = self._best(size, stream)
        if chunk is None:
            chunk = self._new_chunk(size, stream)
        with MACHINE.scheduler.lock:
            self._used += chunk.size
            chunk.allocation.blocks[chunk.ptr] = chunk.size
            access = Access(chunk.ptr, chunk.ptr + chunk.size, True)
            MACHINE.issue(queue, "the pool", [access], functools.partial(_check, access))
        return MemoryPointer(PooledMemory(chunk, self._weak), 0)

    def free(self, chunk: _Chunk) -> None:
        """Takes a chunk back; in the next call, if this comes in the middle of something."""
        self._later.append(chunk)
        if not MACHINE.scheduler.lock.is_mine:
            with MACHINE.scheduler.lock:
                self._tidy()

    def _tidy(self) -> None:
        while self._later:
            self._take_back(self._later.pop())

    def _take_back(self, chunk: _Chunk) -> None:
        _poison(chunk)
        del chunk.allocation.blocks[chunk.ptr]
        self._used -= chunk.size
        chunk.is_used = False
        arena = self._arenas.setdefault(chunk.stream, [])
        following, before = chunk.next, chunk.before
        if following is not None and not following.is_used:
            arena.remove(following)
            _merge(chunk, following)
        if before is not None and not before.is_used:
            arena.remove(before)
            _merge(before, chunk)
            chunk = before
        arena.append(chunk)

    def _best(self, size: int, stream: int) -> _Chunk | None:
        arena = self._arenas.setdefault(stream, [])
        fitting = [chunk for chunk in arena if chunk.size >= size]
        if not fitting:
            return None
        chunk = min(fitting, key=lambda each: each.size)
        arena.remove(chunk)
        chunk.is_used = True
        self._split(chunk, size)
        return chunk

    def free_all_blocks(self, stream: Any = None) -> None:
        """Frees all chunks that are whole allocations, after all work that is queued."""
        freed: list[_Chunk] = []
        with MACHINE.scheduler.lock:
            self._tidy()
            for ptr in list(self._arenas) if stream is None else [stream.ptr]:
                arena = self._arenas.get(ptr, [])
                whole = [chunk for chunk in arena if chunk.before is None and chunk.next is None]
                self._arenas[ptr] = [chunk for chunk in arena if chunk not in whole]
                freed += whole
            self._total -= sum(chunk.size for chunk in freed)
        for chunk in freed:
            MACHINE.free(chunk.memory.ptr, is_pooled=True)
            chunk.memory.ptr = 0
            self._memories.discard(chunk.memory)

    def n_free_blocks(self) -> int:
        return sum(map(len, self._arenas.values()))

    def used_bytes(self) -> int:
        with MACHINE.scheduler.lock:
            self._tidy()
        return self._used

    def free_bytes(self) -> int:
        return self._total - self._used

    def total_bytes(self) -> int:
        return self._total

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        if size is None:
            size = 0 if fraction is None else int(fraction * runtime.memGetInfo()[1])
        elif fraction is not None:
            raise ValueError("size and fraction cannot be specified at one time")
        if size < 0:
            raise ValueError(f"memory limit size out of range: {size}")
        self._limit = size

    def get_limit(self) -> int:
        return self._limit

    def _new_chunk(self, size: int, stream: int) -> _Chunk:
        if self._limit and size > self._limit:
            raise OutOfMemoryError(size, self._total, self._limit)
        memory = None
        for attempt in range(3):
            if attempt == 2:
                gc.collect()
            if attempt:
                self.free_all_blocks()
            with MACHINE.scheduler.lock:
                if self._limit and self._total + size > self._limit:
                    continue
                self._total += size
            try:
                memory = self._allocator(size + _GUARD).mem
            except CUDARuntimeError as error:
                self._total -= size
                if error.status != OUT_OF_MEMORY:
                    raise
                continue
            break
        if memory is None:
            raise OutOfMemoryError(size, self._total, self._limit)
        assert isinstance(memory, Memory)
        allocation = MACHINE.device.at(memory.ptr)
        assert allocation is not None
        allocation.blocks.clear()
        memory.is_pooled = True
        self._memories.add(memory)
        return _Chunk(memory, allocation, memory.ptr, size, stream, is_used=True)

    def _split(self, chunk: _Chunk, size: int) -> None:
        rest = chunk.size - size - _GUARD
        if rest < _UNIT:
            return
        ptr = chunk.ptr + size + _GUARD
        second = _Chunk(chunk.memory, chunk.allocation, ptr, rest, chunk.stream, chunk, chunk.next)
        if chunk.next is not None:
            chunk.next.before = second
        chunk.next, chunk.size = second, size
        self._arenas[chunk.stream].append(second)


def _merge(chunk: _Chunk, following: _Chunk) -> None:
    chunk.size += following.size + _GUARD
    chunk.next = following.next
    if following.next is not None:
        following.next.before = chunk


def _poison(chunk: _Chunk) -> None:
    """Queues the poisoning of a chunk that is freed, on the stream of its arena."""
    start, end = chunk.ptr, chunk.ptr + chunk.size

    def run() -> None:
        if not (bytes_at(end, _GUARD) == POISON).all():
            bytes_at(end, _GUARD)[...] = POISON
            MACHINE.fault(f"something was written beyond the end of {end - start} bytes of a pool")
        bytes_at(start, end - start)[...] = POISON

    MACHINE.give_back(chunk.stream, chunk.allocation, Access(start, end, True), run)


def _check(access: Access) -> None:
    if not (bytes_at(access.start, access.end - access.start) == POISON).all():
        MACHINE.fault(f"something was written into {access.end - access.start} bytes of a pool while nobody had them")


def _malloc(size: int) -> MemoryPointer:
    return MemoryPointer(Memory(size), 0)


class MemoryPool:
    """Pools of all GPUs."""

    def __init__(self, allocator: Callable[[int], MemoryPointer] | None = None) -> None:
        self._pools = [SingleDeviceMemoryPool(allocator) for _ in range(runtime.getDeviceCount())]

    def _pool(self) -> SingleDeviceMemoryPool:
        return self._pools[runtime.getDevice()]

    def malloc(self, size: int) -> MemoryPointer:
        MACHINE.enter()
        return self._pool().malloc(size)

    def free_all_blocks(self, stream: Any = None) -> None:
        MACHINE.enter()
        self._pool().free_all_blocks(stream)

    def n_free_blocks(self) -> int:
        return self._pool().n_free_blocks()

    def used_bytes(self) -> int:
        return self._pool().used_bytes()

    def free_bytes(self) -> int:
        return self._pool().free_bytes()

    def total_bytes(self) -> int:
        return self._pool().total_bytes()

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        self._pool().set_limit(size, fraction)

    def get_limit(self) -> int:
        return self._pool().get_limit()


class _Allocators(threading.local):
    own: Callable[[int], MemoryPointer] | None = None


_default_pool = MemoryPool()
_current: list[Callable[[int], MemoryPointer]] = [_default_pool.malloc]
_allocators = _Allocators()


def alloc(size: int) -> MemoryPointer:
    return (_allocators.own or _current[0])(size)


def set_allocator(allocator: Callable[[int], MemoryPointer] | None = None) -> None:
    if _allocators.own is not None:
        raise ValueError("Can't change the global allocator inside `using_allocator` context manager")
    _current[0] = allocator if allocator is not None else _malloc


def get_allocator() -> Callable[[int], MemoryPointer]:
    return _allocators.own or _current[0]


@contextmanager
def using_allocator(allocator: Callable[[int], MemoryPointer] | None = None) -> Iterator[None]:
    before, _allocators.own = _allocators.own, allocator if allocator is not None else _malloc
    try:
        yield
    finally:
        _allocators.own = before
