"""Moves tensors between the memory of the ops' device and the host's."""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from gradserve_server.devices.compute import PIECE_BYTES, Compute
from gradserve_server.devices.device import Array, Device


class Residence:
    """Brings stored tensors, which are where ops left them, to the host when they are needed there."""

    def __init__(self, host: Device, device: Device, compute: Compute, device_compute: Compute | None = None) -> None:
        """Takes the devices, and what copies.

        Args:
            host: The host as a device.
            device: The device of the ops, which is the same if they run on the CPU.
            compute: Runs what reads and writes the host's memory.
            device_compute: Runs what reads and writes the device's memory; None for the same.
        """
        self._host = host
        self._device = device
        self._compute = compute
        self._device_compute = device_compute or compute

    async def is_on_host(self, arrays: Sequence[Array]) -> bool:
        """Returns True if all the arrays are in host memory."""
        return await self._compute.run(PIECE_BYTES * len(arrays) // 4, lambda: all(map(self._host.holds, arrays)))

    async def copy_to_host(self, arrays: Sequence[Array]) -> list[NDArray[Any]]:
        """Returns arrays in host memory; copies only those that are elsewhere.

        Raises:
            MemoryError: There is not enough memory.
        """
        if await self.is_on_host(arrays):
            return list(arrays)
        return await self._device_compute.run_in_thread(lambda: [self._copy(array) for array in arrays])

    async def copy(self, arrays: Sequence[Array]) -> list[Array]:
        """Returns copies of arrays, each in the memory where the array is.

        Raises:
            MemoryError: There is not enough memory.
        """
        work = max(sum([array.nbytes for array in arrays]), PIECE_BYTES * len(arrays) // 4)
        if await self.is_on_host(arrays):
            return await self._compute.run(work, lambda: [array.copy() for array in arrays])
        return await self._device_compute.run_in_thread(self._copy_each, arrays)

    async def copy_to_device(self, arrays: Sequence[Array]) -> list[Array]:
        """Returns copies of arrays in the memory of the ops' device, which is not the host.

        Raises:
            MemoryError: There is not enough memory.
        """
        return await self._device_compute.run_in_thread(self._copy_each_to_device, arrays)

    async def fill(self, targets: Sequence[Array], arrays: Sequence[Array]) -> None:
        """Fills arrays in the memory of the ops' device with others, wherever these are, of the same dtypes and shapes.

        Returns when they are filled.
        """
        await self._device_compute.run_in_thread(self._fill, targets, arrays)

    def _copy_each(self, arrays: Sequence[Array]) -> list[Array]:
        with self._device.computing():
            return [array.copy() for array in arrays]

    def _copy_each_to_device(self, arrays: Sequence[Array]) -> list[Array]:
        with self._device.computing():
            return [self._device.from_host(array) if self._host.holds(array) else array.copy() for array in arrays]

    def _fill(self, targets: Sequence[Array], arrays: Sequence[Array]) -> None:
        with self._device.computing():
            for target, array in zip(targets, arrays, strict=True):
                if self._host.holds(array):
                    self._device.write(target, 0, array)
                else:
                    target[...] = array

    def _copy(self, array: Array) -> NDArray[Any]:
        if self._host.holds(array):
            host: NDArray[Any] = array
            return host
        with self._device.computing():
            return self._device.to_host(array)
