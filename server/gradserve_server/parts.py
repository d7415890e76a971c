"""The replaceable parts of a server, with their defaults."""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from gradserve_server.accumulators.places.device_place import ConvertingReducer
from gradserve_server.devices.device import CpuDevice, Device
from gradserve_server.devices.gpu_sharing import GpuSharing
from gradserve_server.devices.host.parallel import ForkJoin
from gradserve_server.devices.inventory import Inventory, take_inventory
from gradserve_server.devices.selection import choose_device, sharing_of
from gradserve_server.layers.families import make_layer_families
from gradserve_server.leases.service_clock import ServiceClock
from gradserve_server.ops.operation import Family
from gradserve_server.ops.registry import make_families
from gradserve_server.random_ids import RandomIds
from gradserve_server.rpc.boundary.chain import Interceptor
from gradserve_server.rpc.listeners.grpc_listener import GrpcListener
from gradserve_server.rpc.listeners.listener import MakeListener

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

_LONGEST_TICK_SECONDS = 5.0
"""If the server did not check leases for longer than this, it could not hear its clients either."""


def make_all_families(device: Device, parallel: ForkJoin) -> Mapping[str, Family]:
    """Returns the families of ops and layers on a device, by name."""
    ops = make_families(device, parallel)
    return {**ops, **make_layer_families(device, ops)}


def make_device_reducer(device: Device) -> ConvertingReducer | None:
    """Returns what adds up gradients on a device; None for the host, and for devices on which nothing does."""
    if isinstance(device, CpuDevice):
        return None
    from gradserve_server.devices.cuda.device import CudaDevice
    from gradserve_server.devices.cuda.reduction.reducer import CudaReducer

    return CudaReducer(device) if isinstance(device, CudaDevice) else None


def _new_seed() -> int:
    return secrets.randbits(63)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The replaceable parts of one server.

    Attributes:
        inventory: The devices of the machine.
        choose_device: Returns the device that ops run on, given the name that is wanted, the host and the inventory.
        share_gpu: Returns what opens clients' memory on that device; None if it is not a GPU.
        make_families: Returns the families of ops and layers for a device and the threads that share a piece of work.
        make_device_reducer: Returns what adds up gradients on that device, None if nothing does.
        clock: The clock of leases.
        wall_clock: The time in nanoseconds since 1970, for the order of sharded accumulators of one name.
        new_id: Returns an id that nothing else has.
        new_seed: Returns an unpredictable number of 63 bits.
        interceptors: Interceptors of every call, after those that every server has.
        make_listener: Makes the listener that serves the services, not bound yet.
        tracer_provider: What makes the tracer of the server, which then makes spans, whatever the configuration says.
            None: if that asks for traces, OpenTelemetry's global one.
    """

    inventory: Inventory = field(default_factory=take_inventory)
    choose_device: Callable[[str, CpuDevice, Inventory], Device] = choose_device
    share_gpu: Callable[[Device], GpuSharing | None] = sharing_of
    make_families: Callable[[Device, ForkJoin], Mapping[str, Family]] = make_all_families
    make_device_reducer: Callable[[Device], ConvertingReducer | None] = make_device_reducer
    clock: ServiceClock = field(default_factory=partial(ServiceClock, time.monotonic, _LONGEST_TICK_SECONDS))
    wall_clock: Callable[[], int] = time.time_ns
    new_id: Callable[[], str] = field(default_factory=RandomIds)
    new_seed: Callable[[], int] = _new_seed
    interceptors: tuple[Interceptor, ...] = ()
    make_listener: MakeListener = GrpcListener
    tracer_provider: "TracerProvider | None" = None
