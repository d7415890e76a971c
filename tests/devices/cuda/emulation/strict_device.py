"""A device whose kernels run on the CPU, and whose arrays are as strict as CuPy's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.cuda.programs import CompiledProgram, Program
from gradserve_server.devices.device import bytes_of
from tests.devices.cuda.emulation.arrays import DeviceArray, DeviceNamespace
from tests.devices.cuda.emulation.device import EmulatedDevice


class StrictDevice:
    """A `Device` and a `KernelDevice`, with memory of its own as far as anybody can see.

    Attributes:
        xp: What stands for CuPy.
        emulated: The device in host memory behind it.
    """

    name = "strict:0"
    inline_bytes = 0
    memory_bytes = None

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.emulated = EmulatedDevice(folder, seed=seed)
        self.limits = self.emulated.limits
        self.is_computing = False
        self.xp = DeviceNamespace(self)

    def holds(self, array: Any) -> bool:
        return isinstance(array, DeviceArray)

    def copied(self, array: NDArray[Any]) -> NDArray[Any]:
        return self.emulated.from_host(array)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        return DeviceArray(self.emulated.empty(shape, dtype), self)

    def from_host(self, array: NDArray[Any]) -> DeviceArray:
        assert isinstance(array, np.ndarray)
        return DeviceArray(self.copied(array), self)

    def to_host(self, array: DeviceArray) -> NDArray[Any]:
        return array.hidden.copy()

    def write(self, array: DeviceArray, offset: int, source: NDArray[Any]) -> None:
        bytes_of(array.hidden)[offset : offset + source.nbytes] = bytes_of(source)

    def read(self, array: DeviceArray, offset: int, target: NDArray[Any]) -> None:
        bytes_of(target)[...] = bytes_of(array.hidden)[offset : offset + target.nbytes]

    def limit_memory(self, num_bytes: int) -> None:
        """It has none of its own."""

    def is_full(self, error: BaseException) -> bool:
        return False

    def free_cached(self) -> None:
        """It keeps nothing for later."""

    def trim(self) -> None:
        """It keeps nothing for later."""

    def usage(self) -> None:
        """It counts nothing."""

    def why_lost(self) -> None:
        """It is never lost."""

    @contextmanager
    def computing(self) -> Iterator[None]:
        outer, self.is_computing = self.is_computing, True
        yield
        self.is_computing = outer

    def address(self, array: DeviceArray) -> int:
        assert array.hidden.flags.c_contiguous
        return self.emulated.address(array.hidden)

    def scratch(self, num_bytes: int) -> int:
        return self.emulated.scratch(num_bytes)

    def tickets(self, count: int) -> int:
        return self.emulated.tickets(count)

    def compiled(self, program: Program) -> CompiledProgram:
        return self.emulated.compiled(program)
