"""Accumulators on a device whose kernels run on the CPU: no socket, no thread unless a test has some."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.accumulators.places.device_place import DevicePlace
from gradserve_server.accumulators.places.place import HostPlace, Places
from gradserve_server.config import LeaseConfig
from gradserve_server.devices.compute import Compute, InlineCompute
from gradserve_server.devices.cuda.reduction import CudaReducer
from gradserve_server.devices.device import CpuDevice
from gradserve_server.resources.budget import Budget, Purpose
from gradserve_server.resources.memory import Memory
from gradserve_server.security.identity import ShareRules
from gradserve_server.tensors.eviction import Evictor
from gradserve_server.tensors.held import Residence
from gradserve_server.tensors.store import TensorStore
from tests.devices.cuda.emulation.arrays import DeviceArray
from tests.devices.cuda.emulation.strict_device import StrictDevice
from tests.devices.cuda.reduction.one_program import ReductionDevice
from tests.tensors.keeping import keep_now


class SumsDevice(StrictDevice):
    """Counts copies to the host, and can be full.

    Attributes:
        num_failures: How many of the next allocations fail.
        copied_out: The bytes copied to the host.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.emulated = ReductionDevice(folder)
        self.num_failures = 0
        self.copied_out = 0

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        if self.num_failures:
            self.num_failures -= 1
            raise MemoryError("the device is full")
        return super().empty(shape, dtype)

    def from_host(self, array: Any) -> DeviceArray:
        assert self.is_computing, "nobody waits for the copy"
        copy = self.empty(array.shape, array.dtype)
        copy.hidden[...] = array
        return copy

    def to_host(self, array: DeviceArray) -> Any:
        self.copied_out += array.nbytes
        return super().to_host(array)

    def read(self, array: DeviceArray, offset: int, target: Any) -> None:
        assert self.is_computing, "nobody waits for the copy"
        self.copied_out += target.nbytes
        super().read(array, offset, target)

    def is_full(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)


class OnDevice:
    """A device for accumulators, with stored tensors beside them.

    Attributes:
        device: The device.
        budget: The budget of its bytes.
        host: The budget of the host of stored tensors.
        memory: Both.
        store: The stored tensors.
    """

    def __init__(self, folder: Path, *, limit: int = 1 << 30, compute: Compute | None = None) -> None:
        self.device = SumsDevice(folder)
        self.compute = compute or InlineCompute()
        self.host = Budget(1 << 30, "bytes", ShareRules())
        self.budget = Budget(limit, "bytes of the device", ShareRules())
        self.memory = Memory(self.host, self.budget, self.device.holds)
        pool, ids = BufferPool(0), map(str, itertools.count())
        self.store = TensorStore(
            pool=pool,
            memory=self.memory,
            handles=Budget(1 << 20, "handles"),
            leases=LeaseConfig(),
            clock=lambda: 0.0,
            new_handle=ids.__next__,
        )
        residence = Residence(CpuDevice(pool), self.device, InlineCompute())
        self.evictor = Evictor(self.store, self.memory, residence)

    @property
    def places(self) -> Callable[[HostPlace], Places]:
        """Makes the places of a server whose accumulators are on the device by default."""
        reducer = CudaReducer(self.device)
        there = DevicePlace(self.device.name, reducer, self.device.empty, self.compute, self.device, self.evictor)
        return lambda host: Places(host, there, there.name)

    def array(self, *values: float) -> DeviceArray:
        """An array on the device."""
        with self.device.computing():
            return self.device.from_host(np.array(values, np.float32))

    def keep(self, *values: float) -> DeviceArray:
        """A stored tensor on the device."""
        array = self.array(*values)
        keep_now(self.store, [array], None, shared=False)
        return array

    @property
    def sums(self) -> int:
        """What accumulators have of the device's memory."""
        return self.budget.used_for[Purpose.ACCUMULATORS]
