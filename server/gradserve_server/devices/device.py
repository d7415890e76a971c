"""The interface of devices, and the host as one."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradserve.memory.pool import BufferPool
from gradserve_server.devices.device_usage import DeviceUsage

Array: TypeAlias = Any
"""A C-contiguous array in the memory of some device: NumPy's on the host, CuPy's on a GPU. Both have `dtype`, `shape`
and `nbytes`."""

Allocate: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], Array]
"""Returns an uninitialised array; raises MemoryError if there is not enough memory."""


def bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns a view of the bytes of a C-contiguous host array."""
    return array.reshape(-1).view(np.uint8)


class Device(Protocol):
    """Memory for arrays, and arithmetic on them. Safe to use from several threads."""

    @property
    def name(self) -> str:
        """The name of the device in `gradserve info`: "cpu", "cuda:0", ..."""
        ...

    @property
    def inline_bytes(self) -> int:
        """The most bytes on which work takes less time than waking up a thread."""
        ...

    @property
    def memory_bytes(self) -> int | None:
        """How much of its memory tensors and computations may take at most; None if that is the host's."""
        ...

    def limit_memory(self, num_bytes: int) -> None:
        """Makes sure that it takes little more than this, with what it keeps for later. Called once, before its use."""
        ...

    def holds(self, array: Array) -> bool:
        """Returns True if an array is in this device's memory."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Returns an uninitialised array.

        Raises:
            MemoryError: There is not enough memory.
        """
        ...

    def from_host(self, array: NDArray[Any]) -> Array:
        """Returns a host array in this device's memory: the array itself if that is the host's."""
        ...

    def to_host(self, array: Array) -> NDArray[Any]:
        """Returns an array of this device in host memory: the array itself if it is there already.

        Raises:
            MemoryError: There is not enough memory.
        """
        ...

    def write(self, array: Array, offset: int, source: NDArray[Any]) -> None:
        """Copies the bytes of a C-contiguous host array into an array, from an offset in bytes on.

        In a `computing` block, the host array must not change until the block is left.
        """
        ...

    def read(self, array: Array, offset: int, target: NDArray[Any]) -> None:
        """Fills a C-contiguous host array with the bytes of an array, from an offset in bytes on.

        In a `computing` block, it is filled when the block is left.
        """
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Ensures that work started by this thread in the block is finished when the block is left."""
        ...

    def is_full(self, error: BaseException) -> bool:
        """Returns True if an error says that the device's own memory does not suffice."""
        ...

    def free_cached(self) -> None:
        """Gives back the memory that is kept for later. May wait for work on the device."""
        ...

    def trim(self) -> None:
        """Does the same if more is kept than is worth it."""
        ...

    def usage(self) -> DeviceUsage | None:
        """Returns figures of the device, at once; None if it is the host."""
        ...

    def why_lost(self) -> str | None:
        """Returns why this process cannot use the device any more, None if it can. May wait for work on it."""
        ...


class CpuDevice:
    """The host."""

    name = "cpu"
    inline_bytes = 1 << 18
    """The most bytes of inputs and outputs; memory-bound work on them takes some 50 microseconds."""
    memory_bytes = None

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def limit_memory(self, num_bytes: int) -> None:
        """Does nothing."""

    def holds(self, array: Array) -> bool:
        """Returns True if an array is in host memory; one of NumPy's numbers is, too."""
        return isinstance(array, np.ndarray | np.generic)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an uninitialised array.

        Raises:
            MemoryError: There is not enough memory.
        """
        return self._pool.empty(shape, dtype)

    def from_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """Returns the array itself."""
        return array

    def to_host(self, array: Array) -> NDArray[Any]:
        """Returns the array itself."""
        host: NDArray[Any] = array
        return host

    def write(self, array: Array, offset: int, source: NDArray[Any]) -> None:
        """Copies the bytes of a C-contiguous array into an array, from an offset in bytes on."""
        bytes_of(array)[offset : offset + source.nbytes] = bytes_of(source)

    def read(self, array: Array, offset: int, target: NDArray[Any]) -> None:
        """Fills a C-contiguous array with the bytes of an array, from an offset in bytes on."""
        bytes_of(target)[...] = bytes_of(array)[offset : offset + target.nbytes]

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Does nothing, because functions on the host return when their work is finished."""
        yield

    def is_full(self, error: BaseException) -> bool:
        """Returns False: the host keeps nothing that could be given back."""
        return False

    def free_cached(self) -> None:
        """Does nothing."""

    def trim(self) -> None:
        """Does nothing."""

    def usage(self) -> None:
        """Returns None."""

    def why_lost(self) -> None:
        """Returns None: the host is never lost."""
