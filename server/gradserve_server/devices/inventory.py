"""The devices of this machine."""

import importlib.util
import platform
from dataclasses import dataclass

from gradserve_server.machine import memory_bytes, num_cores


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


def list_devices() -> tuple[DeviceDescription, ...]:
    """Returns the CPU and, if CuPy and a driver are installed, the CUDA devices."""
    cpu = DeviceDescription("cpu", _cpu_description(), memory_bytes())
    return (cpu, *_cuda_devices())


def _cpu_description() -> str:
    return f"{platform.machine()}, {num_cores()} cores"


def _cuda_devices() -> tuple[DeviceDescription, ...]:
    if importlib.util.find_spec("cupy") is None:
        return ()
    import cupy

    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return ()
    devices = []
    for index in range(count):
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        devices.append(
            DeviceDescription(f"cuda:{index}", properties["name"].decode(), int(properties["totalGlobalMem"]))
        )
    return tuple(devices)
