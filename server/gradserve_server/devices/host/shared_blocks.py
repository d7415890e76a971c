"""Memory for averages that clients on this machine read in place."""

import contextlib
import itertools
import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.frames import aligned
from gradserve_protocol.memory.pool import MappedArray, MappedMemory
from gradserve_protocol.memory.sealed import make_region

_MIN_BYTES = 1 << 16
"""Copying less is faster than a client's look-up of a block."""
_MAX_IDLE = 2
"""The most blocks kept for the next averages of one accumulator."""

ArraySpec = tuple[tuple[int, ...], np.dtype[Any]]


class SharedBlock:
    """A region of memory that only this process can write.

    Attributes:
        number: A number unique in the process.
        num_bytes: Its size.
        descriptor: Its file descriptor, which is handed to clients.
        is_spoilt: Whether a client disconnected without having given it back; then it is never written again.
        is_retired: Whether it will not be used again.
    """

    _numbers = itertools.count(1)

    def __init__(self, num_bytes: int) -> None:
        """Makes a block.

        Raises:
            MemoryError: There is not enough memory.
        """
        self.number = next(self._numbers)
        self.num_bytes = num_bytes
        self.descriptor, memory = make_region(num_bytes, read_only_for_others=True)
        self.memory = MappedMemory(memory)
        self.is_spoilt = False
        self.is_retired = False
        weakref.finalize(self, os.close, self.descriptor)


class SharedMemory:
    """Makes blocks, within a limit on their total size.

    A block counts until nothing refers to it: no accumulator that may use it again, no average in it, no connection
    whose client reads it, or may have it mapped.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used = 0
        self._lock = threading.Lock()
        self._freed: deque[int] = deque()
        """The sizes of collected blocks. Filled by finalizers, in any thread."""

    @property
    def used(self) -> int:
        """The bytes of all blocks."""
        with self._lock:
            return self._count()

    def _count(self) -> int:
        while self._freed:
            self._used -= self._freed.popleft()
        return self._used

    def make(self, num_bytes: int) -> SharedBlock:
        """Makes a block. Called in any thread.

        Raises:
            MemoryError: There is not enough memory, or the limit is reached.
        """
        with self._lock:
            if self._count() + num_bytes > self._max_bytes:
                raise MemoryError(f"{self._used} of {self._max_bytes} bytes are used, no room for {num_bytes}")
            block = SharedBlock(num_bytes)
            weakref.finalize(block, self._freed.append, num_bytes).atexit = False
            self._used += num_bytes
        return block


class _Root(MappedArray):
    """The array at the root of all arrays in a block. When it is garbage-collected, the block is free."""

    block: SharedBlock


class Readers:
    """Counts the connections whose clients read averages in place."""

    def __init__(self) -> None:
        self.count = 0


class SharedAverages:
    """Memory for the averages of one accumulator.

    A client that once mapped a block can read whatever is written there later. So a block is used again only for
    averages of the same accumulator, which any reader of one may read as well. Sums are there, too, and visible while
    they grow: separate memory for them would be half as much again, and filling it a tenth of the server's work.
    """

    takes_sums = True

    def __init__(self, memory: SharedMemory, readers: Readers) -> None:
        self._memory = memory
        self._readers = readers
        self._idle: list[SharedBlock] = []
        weakref.finalize(self, _retire_all, self._idle).atexit = False

    def arrays(self, specs: Sequence[ArraySpec]) -> list[NDArray[Any]] | None:
        """Returns uninitialised arrays in one block; None if ordinary memory is as good.

        Args:
            specs: The shapes and dtypes.

        Raises:
            MemoryError: There is not enough memory, or the limit is reached.
        """
        if not self._readers.count:
            return None
        offsets, end = [], 0
        for shape, dtype in specs:
            end = aligned(end)
            offsets.append(end)
            end += math.prod(shape) * dtype.itemsize
        if end < _MIN_BYTES:
            return None
        root = self._root(end)
        return [np.ndarray(shape, dtype, root, offset) for (shape, dtype), offset in zip(specs, offsets, strict=True)]

    def _root(self, num_bytes: int) -> NDArray[np.uint8]:
        block = self._reuse(num_bytes) or self._memory.make(-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        root = _Root.of(block.memory, block.num_bytes)
        root.block = block
        weakref.finalize(root, self._recycle, block).atexit = False
        return root

    def _reuse(self, num_bytes: int) -> SharedBlock | None:
        for block in tuple(self._idle):
            if num_bytes <= block.num_bytes <= 2 * num_bytes + mmap.PAGESIZE:
                with contextlib.suppress(ValueError):  # another thread has just retired it
                    self._idle.remove(block)
                    return block
        return None

    def _recycle(self, block: SharedBlock) -> None:
        # Runs in whatever thread dropped the last array, so it takes no lock: each change of the list is atomic.
        if block.is_spoilt:
            block.is_retired = True
            return
        self._idle.append(block)
        while len(self._idle) > _MAX_IDLE:
            self._idle.pop(0).is_retired = True


def _retire_all(blocks: Sequence[SharedBlock]) -> None:
    for block in blocks:
        block.is_retired = True


@dataclass(frozen=True, slots=True, eq=False)
class BlockPart:
    """A place in a block.

    Attributes:
        block: The block.
        offset: In bytes from its beginning.
        hold: An object that keeps the block from being reused.
    """

    block: SharedBlock
    offset: int
    hold: object


def block_of(buffer: memoryview) -> BlockPart | None:
    """Returns the place of a buffer in a block; None if it is in ordinary memory."""
    part: Any = buffer.obj
    while isinstance(part, np.ndarray):
        if isinstance(part, _Root):
            start = np.frombuffer(buffer, np.uint8).ctypes.data
            return BlockPart(part.block, start - part.ctypes.data, part)
        part = part.base
    return None
