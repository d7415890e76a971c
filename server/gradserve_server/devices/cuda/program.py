"""CUDA C++ programs, the launches of their kernels, and the interface of devices that run them. Needs no GPU."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.device import Array

_DEFINITION = 'extern "C" __global__ '
COMPILE_OPTIONS = ("--std=c++17",)
"""Options for NVRTC. CuPy adds the architecture and `-ftz=true`."""


@dataclass(frozen=True)
class Limits:
    """The properties of a device that decide how work is cut into blocks.

    Attributes:
        num_multiprocessors: The number of its streaming multiprocessors.
        shared_bytes: The most dynamic shared memory that a block may use.
        element_blocks: The most blocks of a kernel over elements for each multiprocessor: twice the number that runs
            at a time. For more work, threads take several elements or vectors.
    """

    num_multiprocessors: int
    shared_bytes: int
    element_blocks: int = 16


@dataclass(frozen=True)
class Program:
    """Kernels of one source, each of which NVRTC compiles by itself.

    Attributes:
        name: Its name, for messages.
        source: CUDA C++ that includes no header. With several kernels, the definition of each is one line.
        kernels: The names of its kernels, which are `extern "C"`, the most usual first.
    """

    name: str
    source: str
    kernels: tuple[str, ...]

    def source_of(self, kernel: str) -> str:
        """Returns the source without the other kernels, which would take most of the time to compile it."""
        if len(self.kernels) == 1:
            return self.source
        lines = self.source.splitlines()
        return "\n".join(line for line in lines if not line.startswith(_DEFINITION) or f" {kernel}(" in line)


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel whose only argument is a struct.

    Attributes:
        kernel: The name of the kernel.
        grid: The number of blocks along x and y.
        threads: The number of threads in a block, along x.
        shared_bytes: The dynamic shared memory of a block.
    """

    kernel: str
    grid: tuple[int, int]
    threads: int
    shared_bytes: int


class CompiledProgram(Protocol):
    """A program on one device. Safe to use from several threads."""

    def prepare(self, kernel: str) -> None:
        """Compiles a kernel, or loads it from a cache, unless that is done."""
        ...

    def launch(self, launch: Launch, arguments: NDArray[Any]) -> None:
        """Starts a kernel after everything that this thread started before; `arguments` is its struct.

        Compiles it first, if need be.
        """
        ...


class KernelDevice(Protocol):
    """A device for launching kernels. Safe to use from several threads."""

    @property
    def limits(self) -> Limits:
        """The properties that decide how work is cut into blocks."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Returns an uninitialised array.

        Raises:
            MemoryError: There is not enough memory.
        """
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Ensures that work started by this thread in the block is finished when the block is left."""
        ...

    def address(self, array: Array) -> int:
        """Returns the address of the elements of an array on this device."""
        ...

    def scratch(self, num_bytes: int) -> int:
        """Returns the address of this thread's scratch memory, which its next kernels may overwrite.

        Raises:
            MemoryError: There is not enough memory.
        """
        ...

    def tickets(self, count: int) -> int:
        """Returns the address of this thread's uint32 counters, which are 0 before and after every kernel.

        Raises:
            MemoryError: There is not enough memory.
        """
        ...

    def compiled(self, program: Program) -> CompiledProgram:
        """Returns a program for this device, whose kernels are compiled when they are needed."""
        ...


def element_sources() -> tuple[str, ...]:
    """Returns the sources with which every program begins: the PTX for float16, then all other code for elements."""
    folder = resources.files(__package__)
    return tuple((folder / f"{name}.cu").read_text(encoding="utf-8") for name in ("half", "floats", "elements"))
