"""Only the device's own threads use its memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.device import CpuDevice
from gradserve_server.tensors.held import Residence
from tests.servers.separate_device import SeparateArray, SeparateDevice


class OnDevice(SeparateArray):
    """An array that its library can also copy and fill."""

    def copy(self) -> "OnDevice":
        return OnDevice(self.hidden.copy())

    def __setitem__(self, where: Any, other: SeparateArray) -> None:
        self.hidden[where] = other.hidden


class Noted(InlineCompute):
    """Counts the work that it runs in threads."""

    num_in_threads = 0

    async def run_in_thread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.num_in_threads += 1
        return function(*args, **kwargs)


@pytest.mark.parametrize("what", ["copy_to_host", "copy", "copy_to_device", "fill"])
@pytest.mark.parametrize("is_on_device", [True, False], ids=["from the device", "from the host"])
async def test_copies(what: str, is_on_device: bool) -> None:
    device, of_host, of_device = SeparateDevice(1 << 20), Noted(), Noted()
    residence = Residence(CpuDevice(BufferPool(0)), device, of_host, of_device)
    values = np.arange(4, dtype=np.float32)
    array: Any = OnDevice(values.copy()) if is_on_device else values
    if what == "fill":
        target: Any = OnDevice(np.zeros(4, np.float32))
        await residence.fill([target], [array])
    else:
        (target,) = await getattr(residence, what)([array])
    found = target if isinstance(target, np.ndarray) else target.hidden
    np.testing.assert_array_equal(found, values)
    uses_device = is_on_device or what in ("copy_to_device", "fill")
    assert (of_host.num_in_threads, of_device.num_in_threads) == (0, int(uses_device))
