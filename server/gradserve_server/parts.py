"""The parts of a server that others can take the place of, and what they are by default."""

import secrets
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from gradserve_server.devices.device import CpuDevice, Device
from gradserve_server.devices.host.parallel import ForkJoin
from gradserve_server.devices.inventory import DeviceDescription, list_devices
from gradserve_server.devices.selection import choose_device
from gradserve_server.layers.families import make_layer_families
from gradserve_server.leases.service_clock import ServiceClock
from gradserve_server.ops.operation import Family
from gradserve_server.ops.registry import make_families
from gradserve_server.rpc.boundary.chain import Interceptor
from gradserve_server.rpc.listeners.grpc_listener import GrpcListener
from gradserve_server.rpc.listeners.listener import MakeListener

_LONGEST_TICK_SECONDS = 5.0
"""A server that did not look after leases for longer heard nobody either."""


def make_all_families(device: Device, parallel: ForkJoin) -> Mapping[str, Family]:
    """Returns the families of ops and layers on a device, by name."""
    ops = make_families(device, parallel)
    return {**ops, **make_layer_families(device, ops)}


def _new_id() -> str:
    return uuid.uuid4().hex


def _new_seed() -> int:
    return secrets.randbits(63)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What one server is made with.

    Attributes:
        devices: Those of the machine.
        choose_device: Returns the one that ops run on, given the name that is wanted, the host and the devices.
        make_families: Returns what computes ops and layers on it, given also the threads that share a piece of work.
        clock: Time as leases count it.
        new_id: Returns what nothing else is called.
        new_seed: Returns a number that nobody can foresee, of 63 bits.
        interceptors: What else happens around every call, after those that every server has.
        make_listener: Makes what serves the services, not bound yet.
    """

    devices: tuple[DeviceDescription, ...] = field(default_factory=list_devices)
    choose_device: Callable[[str, CpuDevice, tuple[DeviceDescription, ...]], Device] = choose_device
    make_families: Callable[[Device, ForkJoin], Mapping[str, Family]] = make_all_families
    clock: ServiceClock = field(default_factory=partial(ServiceClock, time.monotonic, _LONGEST_TICK_SECONDS))
    new_id: Callable[[], str] = _new_id
    new_seed: Callable[[], int] = _new_seed
    interceptors: tuple[Interceptor, ...] = ()
    make_listener: MakeListener = GrpcListener
