"""Between the memory of the device that ops run on and the host's."""

from collections.abc import Iterable, Sequence
from typing import Any

from numpy.typing import NDArray

from gradserve_server.devices.compute import Compute
from gradserve_server.devices.device import Array, Device
from gradserve_server.tensors.store import TensorStore


class Residence:
    """Brings stored tensors, which lie where ops left them, to the host for those who work there."""

    def __init__(self, store: TensorStore, host: Device, device: Device, compute: Compute) -> None:
        """Takes the host as a device, and the one that ops run on: the same where they run on the CPU."""
        self._store = store
        self._host = host
        self._device = device
        self._compute = compute

    def is_on_host(self, arrays: Iterable[Array]) -> bool:
        """Tells whether all of the arrays are in host memory."""
        return all(map(self._host.holds, arrays))

    async def copy_to_host(self, arrays: Sequence[Array]) -> list[NDArray[Any]]:
        """Returns arrays in host memory: themselves if they are there already.

        Raises:
            MemoryError: There is not that much memory.
        """
        if all(map(self._host.holds, arrays)):
            return list(arrays)
        return await self._compute.run_in_thread(lambda: [self._copy(array) for array in arrays])

    async def bring_to_host(self, handles: Iterable[str]) -> None:
        """Makes stored tensors lie in host memory; passes over those that do not exist.

        Raises:
            MemoryError: There is not that much memory.
        """
        if self._device is self._host:
            return
        found = self._store.find(handles)
        away = {handle: array for handle, array in found.items() if not self._host.holds(array)}
        if away:
            copies = await self.copy_to_host(list(away.values()))
            self._store.relocate(dict(zip(away, copies, strict=True)))

    def _copy(self, array: Array) -> NDArray[Any]:
        if self._host.holds(array):
            host: NDArray[Any] = array
            return host
        with self._device.computing():
            return self._device.to_host(array)
