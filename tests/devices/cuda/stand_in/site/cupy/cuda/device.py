"""GPUs."""

from types import TracebackType
from typing import Any

from .._machine import MACHINE
from . import runtime


class Device:
    """A GPU, by its index."""

    def __init__(self, device: "int | Device | None" = None) -> None:
        self.id = runtime.getDevice() if device is None else int(device)
        self._before: list[int] = []

    def __int__(self) -> int:
        return self.id

    def __enter__(self) -> "Device":
        self._before.append(runtime.getDevice())
        if self.id != self._before[-1]:
            runtime.setDevice(self.id)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        runtime.setDevice(self._before.pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def use(self) -> None:
        runtime.setDevice(self.id)

    def synchronize(self) -> None:
        with self:
            runtime.deviceSynchronize()

    @property
    def compute_capability(self) -> str:
        return "90"

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            "MultiProcessorCount": 132,
            "MaxSharedMemoryPerBlockOptin": 227 << 10,
            "ComputeCapabilityMajor": 9,
            "ComputeCapabilityMinor": 0,
        }

    @property
    def mem_info(self) -> tuple[int, int]:
        with self:
            return runtime.memGetInfo()

    @property
    def pci_bus_id(self) -> str:
        return f"0000:{self.id:02x}:00.0"


def get_cublas_handle() -> int:
    """Returns this thread's handle, which takes memory when it is made."""
    return MACHINE.cublas_handle()


def get_device_id() -> int:
    return runtime.getDevice()
