"""Work on a device whose memory may not suffice at first."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from gradserve_server.devices.device import Device

P = ParamSpec("P")
T = TypeVar("T")


class DeviceFullError(MemoryError):
    """The memory of a device does not suffice, even without what was kept for later."""


def with_all_memory(device: Device, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function; once more without what the device keeps for later, if its memory does not suffice.

    The function must be able to begin again.

    Raises:
        DeviceFullError: That did not help.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if not device.is_full(error):
            raise
    # Here the error has gone, and with it the arrays of the first attempt.
    device.free_cached()
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if not device.is_full(error):
            raise
        raise DeviceFullError(str(error)) from None
