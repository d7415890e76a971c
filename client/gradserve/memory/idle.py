"""Memory that waits to be used again."""

from collections import deque
from typing import Generic, TypeVar

MemoryT = TypeVar("MemoryT")


class IdleMemory(Generic[MemoryT]):
    """Unused pieces of memory, by size.

    Safe to use from several threads. It takes no lock, so that finalizers can use it, which run in any thread: deques
    are atomic, and the count may be off by a piece for a moment.
    """

    def __init__(self, max_bytes: int) -> None:
        """Takes the approximate limit of their bytes."""
        self._max_bytes = max_bytes
        self._pieces: dict[int, deque[MemoryT]] = {}
        self.num_bytes = 0
        """The bytes of all pieces."""

    def take(self, num_bytes: int) -> MemoryT | None:
        """Returns a piece of this size, the one used last; None if there is none."""
        try:
            piece = self._pieces[num_bytes].pop()
        except (KeyError, IndexError):
            return None
        self.num_bytes -= num_bytes
        return piece

    def put(self, piece: MemoryT, num_bytes: int) -> None:
        """Keeps a piece, unless that would be more than the limit."""
        if self.num_bytes + num_bytes <= self._max_bytes:
            self._pieces.setdefault(num_bytes, deque()).append(piece)
            self.num_bytes += num_bytes
