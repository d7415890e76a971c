"""Averages in the memory of a device: their copies on the host, and back."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from gradserve_server.accumulators.gradient import Array, HostCopy, Value
from gradserve_server.accumulators.places.average_copies import AllocateAverage, AverageCopies
from gradserve_server.devices.compute import Compute
from gradserve_server.devices.device import Device
from gradserve_server.devices.retry import with_all_memory
from gradserve_server.errors import ResourceExhaustedError
from gradserve_server.resources.quotas import Account, Quota
from gradserve_server.runtime.tasks import OwnTasks
from gradserve_server.security.identity import Identity
from gradserve_server.tensors.eviction import Evictor


class DeviceAverages(AverageCopies):
    """Copies the averages of an accumulator on a device to the host, and back after a restart."""

    def __init__(
        self, device: Device, compute: Compute, evictor: Evictor, memory: Quota, allocate: AllocateAverage
    ) -> None:
        """Takes the device and its memory, what runs copies, and what of the host's memory they count in and are.

        Args:
            device: The device.
            compute: Runs copies.
            evictor: Makes room in the device's memory.
            memory: The quota of bytes on the host.
            allocate: Allocates memory there.
        """
        self._device = device
        self._compute = compute
        self._evictor = evictor
        self._memory = memory
        self._allocate = allocate

    def host_copy(self, values: Mapping[str, Value]) -> HostCopy:
        """Returns the copy of an average in host memory, not made yet."""
        return SharedHostCopy(values, self._compute, self._to_host, Account(self._memory), self._evictor)

    async def brought(self, values: Mapping[str, Value]) -> Mapping[str, Value]:
        """Returns the values of an average on the device; see `AverageCopies`."""
        try:
            return await self._compute.run_in_thread(with_all_memory, self._device, self._to_device, values)
        except MemoryError as error:
            raise ResourceExhaustedError("the device has no memory left for this average") from error

    def _to_host(self, values: Mapping[str, Array]) -> dict[str, Value]:
        arrays = self._allocate([(value.shape, value.dtype) for value in values.values()])
        with self._device.computing():
            for value, array in zip(values.values(), arrays, strict=True):
                self._device.read(value, 0, array)
        for array in arrays:
            array.flags.writeable = False
        return dict(zip(values, arrays, strict=True))

    def _to_device(self, values: Mapping[str, Any]) -> Mapping[str, Value]:
        with self._device.computing():
            return {name: self._device.from_host(value) for name, value in values.items()}


class SharedHostCopy:
    """The copy of one average in host memory, made when somebody needs it first, for all who do: a `HostCopy`.

    It counts in the quota until `close`. Whoever asks for it later, because the average was still about to be sent,
    gets one that counts only while it is made. Used on the event loop only.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        compute: Compute,
        copy: Callable[[Mapping[str, Array]], dict[str, Value]],
        account: Account,
        evictor: Evictor,
    ) -> None:
        """Takes the values, and what copies them.

        Args:
            values: The values on the device.
            compute: Runs the copying.
            copy: Copies.
            account: An account of the host's memory, of nothing yet.
            evictor: Makes room in the device's memory.
        """
        self._values = values
        self._compute = compute
        self._copy = copy
        self._account = account
        self._evictor = evictor
        self._copying: asyncio.Task[Mapping[str, Value]] | None = None
        self._tasks = OwnTasks()
        self._is_closed = False

    @property
    def _num_bytes(self) -> int:
        return sum([value.nbytes for value in self._values.values()])

    async def reserve(self, account: Account, owner: Identity) -> None:
        """Takes memory of the device for handles of the values; stored tensors that nobody uses move for that."""
        await self._evictor.grow(account, self._num_bytes, owner)

    async def values(self) -> Mapping[str, Value]:
        """Returns the values in host memory. If the caller is cancelled, others still get them.

        Raises:
            ResourceExhaustedError: There is not enough memory on the host; a later call tries again.
        """
        if self._copying is None:
            self._account.grow(self._num_bytes)
            self._copying = self._tasks.begin(self._copied())
        return await asyncio.shield(self._copying)

    async def _copied(self) -> Mapping[str, Value]:
        try:
            copied = await self._compute.run_in_thread(self._copy, self._values)
        except BaseException as error:
            self._forget()
            if isinstance(error, MemoryError):
                raise ResourceExhaustedError("the server has no memory left for a copy of this average") from error
            raise
        if self._is_closed:
            self._forget()
        return copied

    def close(self) -> None:
        """Frees the memory, as nobody will ask for the average any more."""
        self._is_closed = True
        if self._copying is not None and self._copying.done():
            self._forget()

    def _forget(self) -> None:
        self._copying = None
        self._account.settle(0)
