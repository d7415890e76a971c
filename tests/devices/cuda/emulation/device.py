"""A device whose kernels run on the CPU."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.cuda.programs import CompiledProgram, Launch, Limits, Program
from tests.devices.cuda.emulation.compiler import compile_for_cpu

H200 = Limits(num_multiprocessors=132, shared_bytes=227 << 10)
_MARGIN_BYTES = 256
_NAN_BYTES = 0xFF
"""A NaN in every dtype."""


class EmulatedDevice:
    """A `KernelDevice` in host memory.

    Every array lies between margins of NaNs: what is read outside of it spoils the result, and what is written there is
    seen by `check_margins`.

    Attributes:
        limits: What kernels are planned for.
        seed: In what order blocks and threads run; 0: one after the other.
        launched: The names of the kernels that ran.
    """

    def __init__(self, folder: Path, limits: Limits = H200, seed: int = 0, offset: int = 0) -> None:
        """Compiles into `folder`. Arrays begin `offset` bytes behind a multiple of 256."""
        self.limits = limits
        self.seed = seed
        self.launched: list[str] = []
        self._folder = folder
        self._offset = offset
        self._arrays: list[tuple[NDArray[np.uint8], int, int]] = []
        self._tickets: NDArray[np.uint32] | None = None

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        memory = np.full(num_bytes + 3 * _MARGIN_BYTES, _NAN_BYTES, np.uint8)
        start = -memory.ctypes.data % _MARGIN_BYTES + _MARGIN_BYTES + self._offset
        self._arrays.append((memory, start, start + num_bytes))
        return memory[start : start + num_bytes].view(dtype).reshape(shape)

    def from_host(self, array: NDArray[Any]) -> NDArray[Any]:
        copy = self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def to_host(self, array: NDArray[Any]) -> NDArray[Any]:
        return array.copy()

    @contextmanager
    def computing(self) -> Iterator[None]:
        yield

    def address(self, array: NDArray[Any]) -> int:
        return array.ctypes.data

    def scratch(self, num_bytes: int) -> int:
        return self.address(self.empty((num_bytes,), np.dtype(np.uint8)))

    def tickets(self, count: int) -> int:
        if self._tickets is None or self._tickets.size < count:
            self._tickets = np.zeros(count, np.uint32)
        return self.address(self._tickets)

    def compiled(self, program: Program) -> CompiledProgram:
        return EmulatedProgram(compile_for_cpu(program, self._folder), self)

    def check_margins(self) -> None:
        """Fails if something was written next to an array, or if tickets were left."""
        for memory, start, end in self._arrays:
            assert (memory[:start] == _NAN_BYTES).all()
            assert (memory[end:] == _NAN_BYTES).all()
        assert self._tickets is None or not self._tickets.any()


class EmulatedProgram:
    """A program compiled for the CPU: a `CompiledProgram`."""

    def __init__(self, library: ctypes.CDLL, device: EmulatedDevice) -> None:
        self._library = library
        self._device = device

    def prepare(self, kernel: str) -> None:
        """Everything is compiled."""

    def launch(self, launch: Launch, arguments: NDArray[Any]) -> None:
        self._device.launched.append(launch.kernel)
        kernel = getattr(self._library, f"emulated_{launch.kernel}")
        status = kernel(
            ctypes.c_void_p(arguments.ctypes.data),
            *launch.grid,
            launch.threads,
            launch.shared_bytes,
            ctypes.c_uint64(self._device.seed),
        )
        assert status == 0, f"{launch}: status {status} of cuda_emulation.h"
