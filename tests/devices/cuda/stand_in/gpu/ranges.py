"""Memory by address: what is allocated, and which queued work uses it."""

from __future__ import annotations

import bisect
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tests.devices.cuda.stand_in.gpu.queues import Queue

POISON = 0xFF
"""A NaN in every dtype: what memory is full of before it is written, and after it was freed."""


def bytes_at(address: int, num_bytes: int) -> NDArray[np.uint8]:
    """Returns the memory at an address of this process."""
    return np.frombuffer(memoryview((ctypes.c_uint8 * num_bytes).from_address(address)), np.uint8)


@dataclass(frozen=True)
class Access:
    """What work does to a range of memory."""

    start: int
    end: int
    writes: bool

    def overlaps(self, other: Access) -> bool:
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True)
class Use:
    """An access by the work with a number on a queue."""

    access: Access
    queue: Queue
    number: int
    name: str


@dataclass
class Allocation:
    """Memory that was allocated at once, and may be handed out in blocks.

    Attributes:
        start: The address of its first byte.
        num_bytes: Its size.
        kind: "device", "pinned" or "ipc".
        blocks: The sizes of the blocks that are handed out, by address.
        uses: What queued work does to it, as far as the host does not know that it is over.
    """

    start: int
    num_bytes: int
    kind: str
    blocks: dict[int, int] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + self.num_bytes

    def block_at(self, address: int) -> tuple[int, int] | None:
        """Returns the start and the end of the block that has an address."""
        for start, size in self.blocks.items():
            if start <= address < start + size:
                return start, start + size
        return None

    def unfinished(self, access: Access) -> Iterator[Use]:
        """Yields the uses of a range that the host does not know to be over, the newest first; forgets all others."""
        self.uses = [use for use in self.uses if use.number > use.queue.observed]
        return (use for use in reversed(self.uses) if use.access.overlaps(access))


AllocationT = TypeVar("AllocationT", bound=Allocation)


class Ranges(Generic[AllocationT]):
    """Allocations, by address. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._starts: list[int] = []
        self._allocations: list[AllocationT] = []

    def __iter__(self) -> Iterator[AllocationT]:
        with self._lock:
            return iter(list(self._allocations))

    def add(self, allocation: AllocationT) -> None:
        with self._lock:
            place = bisect.bisect(self._starts, allocation.start)
            self._starts.insert(place, allocation.start)
            self._allocations.insert(place, allocation)

    def remove(self, allocation: AllocationT) -> None:
        with self._lock:
            place = self._starts.index(allocation.start)
            del self._starts[place], self._allocations[place]

    def at(self, address: int) -> AllocationT | None:
        """Returns the allocation that has an address."""
        with self._lock:
            place = bisect.bisect(self._starts, address) - 1
            if place >= 0 and address < self._allocations[place].end:
                return self._allocations[place]
            return None

    def overlapping(self, start: int, end: int) -> AllocationT | None:
        """Returns an allocation that has a part of a range."""
        with self._lock:
            place = bisect.bisect_left(self._starts, end) - 1
            if place >= 0 and self._allocations[place].end > start:
                return self._allocations[place]
            return None
