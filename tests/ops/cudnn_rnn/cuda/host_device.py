"""Host memory in the place of a GPU's, for a stand-in of cuDNN."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.cuda.programs import CompiledProgram, Launch, Program
from tests.devices.cuda.emulation.device import H200, EmulatedDevice

_ALIGNMENT = 256


class HostDevice:
    """Kernels are emulated, one at a time."""

    compute_capability = "90"

    def __init__(self, folder: Path) -> None:
        """Compiles kernels into a folder."""
        self._threads = threading.local()
        self._emulation = threading.Lock()
        self._emulated = EmulatedDevice(folder, seed=7)
        self._programs: dict[Program, CompiledProgram] = {}
        self.limits = H200

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Filled with ones, which are no number that anybody would expect: NaN, or -1."""
        dtype = np.dtype(dtype)
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        memory = np.full(num_bytes + _ALIGNMENT, 0xFF, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + num_bytes].view(dtype).reshape(shape)

    def from_host(self, array: NDArray[Any]) -> NDArray[Any]:
        copy = self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def to_host(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.array(array)

    @contextmanager
    def computing(self) -> Iterator[None]:
        yield

    def address(self, array: NDArray[Any]) -> int:
        return int(array.ctypes.data)

    def scratch(self, num_bytes: int) -> int:
        self._threads.scratch = self.empty((num_bytes,), np.dtype(np.uint8))
        return self.address(self._threads.scratch)

    def compiled(self, program: Program) -> CompiledProgram:
        with self._emulation:
            if program not in self._programs:
                self._programs[program] = self._emulated.compiled(program)
        return _OneAtATime(self._programs[program], self._emulation)

    def stream(self) -> int:
        return threading.get_ident()


class _OneAtATime:
    def __init__(self, program: CompiledProgram, lock: threading.Lock) -> None:
        self._program = program
        self._lock = lock

    def prepare(self, kernel: str) -> None:
        """Everything is compiled."""

    def launch(self, launch: Launch, arguments: NDArray[Any]) -> None:
        with self._lock:
            self._program.launch(launch, arguments)
