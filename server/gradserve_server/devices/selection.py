"""Chooses the device that ops run on, and what opens clients' memory there."""

import logging

from gradserve.gpu.driver import GpuError
from gradserve_server.devices.device import CpuDevice, Device
from gradserve_server.devices.gpu_sharing import GpuSharing
from gradserve_server.devices.inventory import NO_CUPY, Inventory

_log = logging.getLogger(__name__)


class NoSuchDeviceError(Exception):
    """The machine or the server does not have the requested device; the message lists those it has.

    Attributes:
        setting: The setting that asks for it.
    """

    def __init__(self, message: str, setting: str = "device") -> None:
        """Takes the message and the setting."""
        super().__init__(message)
        self.setting = setting


def choose_device(wanted: str, host: CpuDevice, inventory: Inventory) -> Device:
    """Returns the device with a name from `gradserve info`; for "auto" the first GPU, or the host if there is none.

    Args:
        wanted: The name, or "cuda" for the first GPU.
        host: The device of the CPU.
        inventory: The devices of the machine.

    Raises:
        NoSuchDeviceError: The machine has no device of this name.
    """
    names = [device.name for device in inventory.devices]
    why_no_gpu = inventory.why_no_gpu
    if wanted == "auto":
        wanted = next((name for name in names if name.startswith("cuda:")), host.name)
        if why_no_gpu not in (None, NO_CUPY):  # whoever has installed CuPy wants a GPU
            _log.warning("ops run on the CPU: %s", why_no_gpu)
    if wanted == "cuda":
        wanted = "cuda:0"
    if wanted == host.name:
        return host
    if wanted not in names:
        lacking = "" if why_no_gpu is None else f"; {why_no_gpu}"
        raise NoSuchDeviceError(
            f"expected a device of this machine, {', '.join(names)} or auto, got {wanted!r}{lacking}"
        )
    from gradserve_server.devices.cuda.device import CudaDevice

    return CudaDevice(int(wanted.removeprefix("cuda:")), host.empty)


def sharing_of(device: Device) -> GpuSharing | None:
    """Returns what opens clients' memory on a device; None if it is not a GPU, or its driver does not tell which."""
    if not device.name.startswith("cuda:"):
        return None
    from gradserve_server.devices.cuda.device import CudaDevice
    from gradserve_server.devices.cuda.sharing import CudaSharing

    assert isinstance(device, CudaDevice), "there is one kind of GPU"
    try:
        return CudaSharing(device)
    except GpuError as error:
        _log.warning("clients cannot hand over memory of %s: %s", device.name, error)
        return None
