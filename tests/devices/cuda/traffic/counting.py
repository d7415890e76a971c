"""A device in host memory whose kernels count what they load and store."""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.cuda.programs import CompiledProgram, Launch, Limits, Program
from tests.devices.cuda.emulation.compiler import compile_for_cpu
from tests.devices.cuda.emulation.device import H200, EmulatedDevice, EmulatedProgram

HERE = Path(__file__).parent
_OPTIONS = ("-fsanitize-coverage=func,trace-loads,trace-stores", f"-I{HERE}", "-include", str(HERE / "traffic.h"))


@dataclass
class Traffic:
    """The bytes that a kernel has moved.

    Attributes:
        kernel: Its name.
        loaded: The bytes that its blocks have loaded from device memory, each once per block.
        stored: The bytes that it has stored there.
    """

    kernel: str
    loaded: int
    stored: int

    @property
    def moved(self) -> int:
        """The bytes of both."""
        return self.loaded + self.stored


class CountingDevice(EmulatedDevice):
    """An emulated device.

    Attributes:
        traffic: What each launch has moved, in order.
        programs: The compiled programs, by kernel.
    """

    def __init__(self, folder: Path, limits: Limits = H200) -> None:
        super().__init__(folder, limits)
        self.traffic: list[Traffic] = []
        self.programs: dict[str, Program] = {}

    def compiled(self, program: Program) -> CompiledProgram:
        self.programs |= dict.fromkeys(program.kernels, program)
        return _CountingProgram(compile_for_cpu(program, self._folder, _OPTIONS), self)

    @property
    def places(self) -> list[tuple[int, int]]:
        """The addresses of all arrays, and of their ends."""
        return [(memory.ctypes.data + start, memory.ctypes.data + end) for memory, start, end in self._arrays]


class _CountingProgram(EmulatedProgram):
    def __init__(self, library: ctypes.CDLL, device: CountingDevice) -> None:
        super().__init__(library, device)
        self._counting = device

    def launch(self, launch: Launch, arguments: NDArray[Any]) -> None:
        places = np.array(self._counting.places, np.uint64).reshape(-1, 2)
        begins, ends = (np.ascontiguousarray(places[:, column]) for column in (0, 1))
        assert self._library.watch_traffic(_pointer(begins), _pointer(ends), len(places)), "too many arrays"
        super().launch(launch, arguments)
        loaded, stored = (np.zeros(len(places), np.uint64) for _ in range(2))
        self._library.read_traffic(_pointer(loaded), _pointer(stored))
        self._counting.traffic.append(Traffic(launch.kernel, int(loaded.sum()), int(stored.sum())))


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
