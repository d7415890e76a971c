"""The devices of this machine."""

import importlib.util
import platform
from dataclasses import dataclass

from gradserve_server.runtime.machine import memory_bytes, num_cores

NO_CUPY = "CuPy is not installed: see the extras cuda12 and cuda13"


@dataclass(frozen=True)
class DeviceDescription:
    """A device of this machine.

    Attributes:
        name: "cpu", "cuda:0", ...
        description: A description in words.
        total_memory_bytes: The size of its memory.
    """

    name: str
    description: str
    total_memory_bytes: int


@dataclass(frozen=True)
class Inventory:
    """The devices of this machine.

    Attributes:
        devices: The CPU, and the GPUs that can be used.
        why_no_gpu: Why there are no GPUs among them; None if there are.
    """

    devices: tuple[DeviceDescription, ...]
    why_no_gpu: str | None


def take_inventory() -> Inventory:
    """Returns the CPU and, if CuPy and a driver are installed, the CUDA devices."""
    cpu = DeviceDescription("cpu", _cpu_description(), memory_bytes())
    gpus, why_none = _gpus()
    return Inventory((cpu, *gpus), why_none)


def _cpu_description() -> str:
    return f"{platform.machine()}, {num_cores()} cores"


def _gpus() -> tuple[list[DeviceDescription], str | None]:
    if importlib.util.find_spec("cupy") is None:
        return [], NO_CUPY
    from gradserve_server.devices.cuda.importing import import_cupy

    try:
        cupy = import_cupy()
    except ImportError as error:
        return [], f"CuPy cannot be imported: {error}"
    runtime = cupy.cuda.runtime
    try:
        gpus = [_described(index, runtime.getDeviceProperties(index)) for index in range(runtime.getDeviceCount())]
    except runtime.CUDARuntimeError as error:  # such as a driver that is too old for the CUDA of CuPy
        return [], f"CUDA cannot be used: {error}"
    return gpus, None if gpus else "CUDA finds no GPU"


def _described(index: int, properties: dict[str, object]) -> DeviceDescription:
    name, total = properties["name"], properties["totalGlobalMem"]
    assert isinstance(name, bytes)
    assert isinstance(total, int)
    return DeviceDescription(f"cuda:{index}", name.decode(), total)
