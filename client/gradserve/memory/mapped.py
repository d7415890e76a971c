"""Maps of memory, and the arrays that lie in them."""

import mmap
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


class MappedMemory:
    """A map of memory. It can be told apart from others, and others can learn that it is gone.

    Attributes:
        map: The map. Whoever refers to it keeps the memory; nobody does longer than this object lives, unless it has to
            give the memory back to somebody first.
        address: The address of its first byte.
        num_bytes: Its size.
        is_writable: Whether this process can write to it.
    """

    __slots__ = ("__weakref__", "address", "is_writable", "map", "num_bytes")

    def __init__(self, memory: mmap.mmap) -> None:
        """Takes a map."""
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
    """Returns the map that an array lies in, however many views are between them; None if it is in no known one."""
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
