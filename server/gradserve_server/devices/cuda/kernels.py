"""Declares, compiles and launches the CUDA kernels of families. Nothing here needs a GPU."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.cuda.program import CompiledProgram, KernelDevice, Launch, Limits, Program

ELEMENTS: Mapping[np.dtype[Any], str] = {
    np.dtype(np.float16): "Half",
    np.dtype(ml_dtypes.bfloat16): "BFloat16",
    np.dtype(np.float32): "float",
    np.dtype(np.float64): "double",
}
"""The C++ type of the elements of each dtype; see floats.cu."""

ELEMENT_THREADS = 256

KeyT = TypeVar("KeyT")


def instance(name: str, bounds: str, struct: str, template: str) -> str:
    """Returns the definition of a kernel, which instantiates a template.

    Args:
        name: The name of the kernel.
        bounds: The arguments of `__launch_bounds__`.
        struct: The C++ type of its only argument.
        template: The function template, with its arguments.
    """
    return (
        f'extern "C" __global__ void __launch_bounds__({bounds}) {name}(const __grid_constant__ {struct} arguments) '
        f"{{ {template}(arguments); }}"
    )


def element_launch(kernel: str, count: int, limits: Limits, *, width: int = 1) -> Launch:
    """Returns the launch of a kernel for `count` elements, at least one, of which threads take `width` at a time."""
    blocks = min(-(-count // (width * ELEMENT_THREADS)), limits.element_blocks * limits.num_multiprocessors)
    return Launch(kernel, (blocks, 1), ELEMENT_THREADS, 0)


@dataclass(frozen=True)
class Struct:
    """The only argument of a kernel: the addresses of its arrays, then int64 numbers, then float64 numbers.

    Attributes:
        arrays: The names of the arrays.
        numbers: The names of the int64 numbers.
        floats: The names of the float64 numbers.
    """

    arrays: tuple[str, ...]
    numbers: tuple[str, ...]
    floats: tuple[str, ...] = ()

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The struct in the layout of C++."""
        kinds = ((self.arrays, np.uint64), (self.numbers, np.int64), (self.floats, np.float64))
        return np.dtype([(name, kind) for names, kind in kinds for name in names])

    def of(self, addresses: Mapping[str, int], numbers: Mapping[str, float]) -> NDArray[Any]:
        """Returns the argument of a launch, with the addresses and numbers that the struct has."""
        arguments = np.zeros((), self.dtype)
        for name in self.arrays:
            arguments[name] = addresses[name]
        for name in (*self.numbers, *self.floats):
            arguments[name] = numbers[name]
        return arguments


class Programs(Generic[KeyT]):
    """The programs of a family on one device. Kernels are compiled when they are first needed, or all in advance."""

    def __init__(self, device: KernelDevice, program: Callable[[KeyT], Program], keys: Iterable[KeyT]) -> None:
        """Takes a function that returns the program of a key, and the keys, in the order in which to prepare them."""
        self._device = device
        self._program = program
        self._keys = tuple(keys)
        self._programs: dict[KeyT, CompiledProgram] = {}

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Compiles all kernels, or loads them from a cache; ends early, between two kernels, once `stop()`."""
        for key in self._keys:
            if not self._prepare(key, stop):
                return

    def make_ready(self, key: KeyT) -> None:
        """Compiles all kernels of a program, or loads them from a cache: to launch them cannot fail for that."""
        self._prepare(key, lambda: False)

    def __getitem__(self, key: KeyT) -> CompiledProgram:
        """Returns a program. Safe to call from several threads."""
        known = self._programs.get(key)
        if known is None:
            known = self._programs[key] = self._device.compiled(self._program(key))
        return known

    def _prepare(self, key: KeyT, stop: Callable[[], bool]) -> bool:
        """Compiles the kernels of a program; returns False if it was to stop before the last one."""
        for kernel in self._program(key).kernels:
            if stop():
                return False
            self[key].prepare(kernel)
        return True
