"""A store on a device with little memory, without a server."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from gradserve_protocol.memory.pool import BufferPool
from gradserve_server.config import LeaseConfig
from gradserve_server.devices.compute import InlineCompute
from gradserve_server.devices.device import CpuDevice
from gradserve_server.resources.budget import Budget, Purpose, Reservation
from gradserve_server.resources.memory import Memory
from gradserve_server.runtime.event_loop import Turn
from gradserve_server.security.identity import ANONYMOUS, Identity, OwnLimits, ShareRules, owner_named
from gradserve_server.tensors.eviction import Evictor
from gradserve_server.tensors.held import Residence
from gradserve_server.tensors.store import TensorStore
from tests.servers.separate_device import SeparateArray, SeparateDevice
from tests.tensors.keeping import keep_now

LIMIT = 100
RESERVED = 20
OWN_LIMIT = 50
LEASE = 10.0


class GatedCompute(InlineCompute):
    """Copies begin when a test says so.

    Attributes:
        gate: Cleared to stop copies.
        is_copying: Set while one waits.
        before: Called before each copy.
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_copying = asyncio.Event()
        self.before: Callable[[], object] = lambda: None

    async def run_in_thread(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.is_copying.set()
        try:
            await self.gate.wait()
            self.before()
            return function(*args, **kwargs)
        finally:
            self.is_copying.clear()


class World:
    """A device with 100 bytes, 20 of them reserved for who has no more; "limited" may have 50."""

    def __init__(self, host_limit: int = 1000, max_handles: int = 1000) -> None:
        self.now = 0.0
        rules = ShareRules(RESERVED / LIMIT, self._limits)
        self.device = SeparateDevice(LIMIT)
        self.host = Budget(host_limit, "bytes of tensor memory", rules)
        self.budget = Budget(LIMIT, "bytes of device memory", rules, of_identity=lambda own: own.max_device_bytes)
        self.memory = Memory(self.host, self.budget, self.device.holds)
        self.handles = Budget(max_handles, "tensor handles")
        self.compute = GatedCompute()
        numbers = iter(range(1 << 30))
        self.store = TensorStore(
            pool=BufferPool(0),
            memory=self.memory,
            handles=self.handles,
            leases=LeaseConfig(default_lease_seconds=LEASE, max_lease_seconds=LEASE),
            clock=lambda: self.now,
            new_handle=lambda: f"h{next(numbers)}",
        )
        residence = Residence(CpuDevice(BufferPool(0)), self.device, self.compute)
        self.evictor = Evictor(self.store, self.memory, residence)

    @staticmethod
    def _limits(name: str) -> OwnLimits:
        return OwnLimits(max_device_bytes=OWN_LIMIT if name == "limited" else None)

    def reservation(self, owner: str = "") -> Reservation:
        return self.budget.reserve(owner=owner_named(owner), purpose=Purpose.COMPUTING)

    def array(self, num_bytes: int, value: int = 7) -> SeparateArray:
        return SeparateArray(np.full(num_bytes, value, np.uint8))

    def keep(self, num_bytes: int, owner: str = "", value: int = 7) -> str:
        """Stores a tensor that an op has left on the device."""
        (handle,) = keep_now(self.store, [self.array(num_bytes, value)], None, shared=False, owner=owner_named(owner))
        return handle

    async def take(self, num_bytes: int, owner: str = "") -> Reservation:
        """Takes memory, as a call does for its outputs."""
        reservation = self.reservation(owner)
        await self.evictor.grow(reservation, num_bytes, owner_named(owner))
        return reservation

    def is_on_device(self, handle: str) -> bool:
        return self.device.holds(self.found(handle))

    def found(self, handle: str) -> Any:
        """Returns the array of a tensor, without using it."""
        return self.store._entries[handle].array

    def value(self, handle: str) -> int:
        array = self.found(handle)
        elements = array.hidden if isinstance(array, SeparateArray) else array
        (value,) = set(elements.tolist())
        return int(value)

    def expire(self, seconds: float) -> int:
        self.now += seconds
        return self.store.expire(Turn(1000))

    @property
    def used(self) -> tuple[int, int]:
        """Bytes of the host and of the device."""
        return self.host.used, self.budget.used


def identity(name: str) -> Identity:
    return owner_named(name) if name else ANONYMOUS
