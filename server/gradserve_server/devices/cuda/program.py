"""CUDA C++ programs, launches of their kernels, and what runs them: nothing here needs a GPU."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import Array

COMPILE_OPTIONS = ("--std=c++17",)
"""For NVRTC. CuPy adds the architecture and `-ftz=true`."""


@dataclass(frozen=True)
class Limits:
    """What of a device decides how work is cut into blocks.

    Attributes:
        num_multiprocessors: Its streaming multiprocessors.
        shared_bytes: The most dynamic shared memory that a block may ask for.
    """

    num_multiprocessors: int
    shared_bytes: int


@dataclass(frozen=True)
class Program:
    """What NVRTC compiles in one go.

    Attributes:
        name: For messages.
        source: CUDA C++ that includes no header.
        kernels: The names of its kernels, which are `extern "C"`.
    """

    name: str
    source: str
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel whose only argument is a struct.

    Attributes:
        kernel: Its name.
        grid: Blocks, along x and y.
        threads: Of a block, along x.
        shared_bytes: Dynamic shared memory of a block.
    """

    kernel: str
    grid: tuple[int, int]
    threads: int
    shared_bytes: int


class CompiledProgram(Protocol):
    """A program on one device. Safe to use from several threads."""

    def launch(self, launch: Launch, arguments: NDArray[Any]) -> None:
        """Starts a kernel behind what this thread started before; `arguments` is its struct."""
        ...


class KernelDevice(Protocol):
    """A device as those who launch kernels see it. Safe to use from several threads."""

    @property
    def limits(self) -> Limits:
        """What decides how work is cut into blocks."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Returns an uninitialised array.

        Raises:
            MemoryError: There is not that much memory.
        """
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Work started by this thread inside the block is finished when the block is left."""
        ...

    def address(self, array: Array) -> int:
        """Returns where the elements of an array of this device are."""
        ...

    def scratch(self, num_bytes: int) -> int:
        """Returns the address of memory of this thread's own, which its next kernels may overwrite.

        Raises:
            MemoryError: There is not that much memory.
        """
        ...

    def tickets(self, count: int) -> int:
        """Returns the address of uint32 counters of this thread's own. They are 0; kernels leave them so.

        Raises:
            MemoryError: There is not that much memory.
        """
        ...

    def compiled(self, program: Program) -> CompiledProgram:
        """Returns a program compiled, once, for this device."""
        ...


def element_sources() -> tuple[str, ...]:
    """Returns what every program begins with: what takes PTX for float16, then all else that is about elements."""
    folder = resources.files(__package__)
    return tuple((folder / f"{name}.cu").read_text(encoding="utf-8") for name in ("half", "floats", "elements"))
