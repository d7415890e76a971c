"""Programs and kernels, compiled for the CPU."""

import ctypes
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np

from gradserve_server.devices.cuda.programs import Program
from tests.devices.cuda.emulation.compiler import compile_for_cpu
from tests.devices.cuda.stand_in.gpu.errors import CUDADriverError
from tests.devices.cuda.stand_in.gpu.ranges import Access

from .. import cuda
from .._machine import MACHINE

_KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\([^)]*\) (\w+)\(const __grid_constant__ (\w+)')


class RawModule:
    """A program; its kernels are compiled when the first of them is launched."""

    def __init__(self, *, code: str, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        assert backend == "nvrtc"
        assert all(isinstance(option, str) for option in options)
        self._code = code
        self._structs = dict(_KERNEL.findall(code))
        self._lock = threading.Lock()
        self._library: ctypes.CDLL | None = None
        self._is_loaded = False

    def get_function(self, name: str) -> "Function":
        MACHINE.enter()
        with self._lock:
            if not self._is_loaded and not MACHINE.take_outside("module", MACHINE.settings.module_bytes):
                raise CUDADriverError(2)
            self._is_loaded = True
        if name not in self._structs:
            raise KeyError(name)
        return Function(self, name, _constness(self._code, self._structs[name]))

    def library(self) -> ctypes.CDLL:
        """Returns the compiled program."""
        with self._lock:
            if self._library is None:
                folder = Path(MACHINE.settings.folder)
                self._library = compile_for_cpu(Program("stand-in", self._code, tuple(self._structs)), folder)
            return self._library


class Function:
    """A kernel, whose only argument is a struct."""

    def __init__(self, module: RawModule, name: str, writes: list[bool]) -> None:
        self._module = module
        self._name = name
        self._writes = writes
        self.max_dynamic_shared_size_bytes = 48 << 10

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int = 0
    ) -> None:
        (arguments,) = args
        assert arguments.size == 1, "CuPy passes arrays of one element by value"
        assert shared_mem <= self.max_dynamic_shared_size_bytes
        queue = MACHINE.queue(cuda.get_current_stream().ptr)
        given = arguments.tobytes()
        launch = getattr(self._module.library(), f"emulated_{self._name}")
        (x, y), (threads,) = (*grid, 1)[:2], block[:1]
        seed = MACHINE.scheduler.draw()

        def run() -> None:
            status = launch(given, x, y, threads, shared_mem, ctypes.c_uint64(seed))
            if status:
                MACHINE.fault(f"{self._name}: status {status} of cuda_emulation.h")

        MACHINE.issue(queue, self._name, self._accesses(arguments), run)

    def _accesses(self, arguments: Any) -> list[Access]:
        """Returns what the kernel may use: from each address to the end of its block.

        There may be further addresses behind the pointers, and in tables to which they point.
        """
        given = arguments.tobytes()
        num_pointers = len(self._writes)
        addresses = np.frombuffer(given, np.uint64, num_pointers).tolist()
        used = zip(addresses, self._writes, strict=True)
        accesses = [MACHINE.from_address(address, writes=writes) for address, writes in used if address]
        for words in (given[8 * num_pointers :], *(MACHINE.uploaded.get(address, b"") for address in addresses)):
            accesses += MACHINE.found_in(words)
        return accesses


def _constness(code: str, struct: str) -> list[bool]:
    """Returns for each pointer in a struct of C++ whether the kernel may write there. Structs begin with pointers."""
    found = re.search(rf"struct {struct} \{{(.*?)\n\}};", code, re.DOTALL)
    assert found is not None, f"struct {struct} is not in the program"
    lines = [line.split("//")[0].strip() for line in found[1].strip().splitlines()]
    pointers = [line for line in lines if "*" in line]
    assert pointers == lines[: len(pointers)], f"struct {struct} does not begin with its pointers"
    return [not line.startswith("const ") for line in pointers]
