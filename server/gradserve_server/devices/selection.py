"""Chooses the device that ops run on."""

import importlib.util
from collections.abc import Sequence

from gradserve_server.devices.device import CpuDevice, Device
from gradserve_server.devices.inventory import DeviceDescription


class NoSuchDeviceError(Exception):
    """The machine does not have the requested device; the message lists those it has."""


def choose_device(wanted: str, host: CpuDevice, devices: Sequence[DeviceDescription]) -> Device:
    """Returns the device with a name from `gradserve info`; for "auto" the first GPU, or the host if there is none.

    Args:
        wanted: The name, or "cuda" for the first GPU.
        host: The device of the CPU.
        devices: The devices of the machine.

    Raises:
        NoSuchDeviceError: The machine has no device of this name.
    """
    names = [device.name for device in devices]
    if wanted == "auto":
        wanted = next((name for name in names if name.startswith("cuda:")), host.name)
    if wanted == "cuda":
        wanted = "cuda:0"
    if wanted == host.name:
        return host
    if wanted not in names:
        lacking = (
            "" if importlib.util.find_spec("cupy") else "; CuPy is not installed: see the extras cuda12 and cuda13"
        )
        raise NoSuchDeviceError(
            f"expected a device of this machine, {', '.join(names)} or auto, got {wanted!r}{lacking}"
        )
    from gradserve_server.devices.cuda.device import CudaDevice

    return CudaDevice(int(wanted.removeprefix("cuda:")))
