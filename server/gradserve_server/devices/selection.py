"""Chooses the device that ops run on."""

import importlib.util

from gradserve_server.devices.device import CpuDevice, Device
from gradserve_server.devices.inventory import list_devices


class NoSuchDeviceError(Exception):
    """The machine does not have the device that was asked for; the message says what it has."""


def choose_device(wanted: str, host: CpuDevice) -> Device:
    """Returns the device of a name as `gradserve info` lists it, or for "auto" the first GPU, else the host.

    Raises:
        NoSuchDeviceError: There is none of this name.
    """
    names = [device.name for device in list_devices()]
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
