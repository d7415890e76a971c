"""Components of a server: the replaceable parts with their defaults, its state directory, its counts."""

import json
import logging
import resource
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gradserve_protocol.address import Address
from gradserve_protocol.memory.pool import BufferPool
from gradserve_protocol.server_status import MemoryStatus
from gradserve_protocol.tls import CertificateFiles
from gradserve_server.accumulators.journal import AccumulatorJournals
from gradserve_server.accumulators.places.device_place import ConvertingReducer
from gradserve_server.accumulators.registry import AccumulatorRegistry
from gradserve_server.accumulators.sharding.home import later_incarnation
from gradserve_server.config import LimitsConfig, StateConfig
from gradserve_server.devices.device import CpuDevice, Device, GpuSharing
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.inventory import Inventory, choose_device, sharing_of, take_inventory
from gradserve_server.layers.batch_norm.computation import make_layer_families
from gradserve_server.layers.batch_norm.journal import LayerJournals
from gradserve_server.observe.calls import Way
from gradserve_server.ops.operation import Family
from gradserve_server.ops.registry import make_families
from gradserve_server.parameters.journal import ParametersJournals
from gradserve_server.parameters.registry import ParametersRegistry
from gradserve_server.resources.budget import Purpose
from gradserve_server.resources.lifetimes import ClientLeases
from gradserve_server.resources.memory import Budgets
from gradserve_server.resources.registry import RandomIds
from gradserve_server.rpc.boundary.chain import Interceptor, Service
from gradserve_server.rpc.boundary.interceptors import Admission
from gradserve_server.rpc.listeners.grpc.listener import GrpcListener
from gradserve_server.rpc.listeners.sockets.context import FairSockets
from gradserve_server.rpc.listeners.sockets.payloads import max_regions
from gradserve_server.runtime.event_loop import ServiceClock
from gradserve_server.runtime.files import reason_of
from gradserve_server.storage.backup_schedule import BackupSchedule
from gradserve_server.storage.directory import StateDirectory, StateError
from gradserve_server.storage.journal import Durability
from gradserve_server.storage.store import StateStore

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


_LONGEST_TICK_SECONDS = 5.0
"""If the server did not check leases for longer than this, it could not hear its clients either."""


class Listener(Protocol):
    """Listens for calls to services. Made and used on one event loop; serves once."""

    def bind(self, addresses: Sequence[Address]) -> list[Address]:
        """Binds to addresses; returns them with the ports picked for port 0, and with absolute paths.

        Raises:
            OSError: One of them cannot be bound; the message says which and why.
        """
        ...

    async def serve(self) -> None:
        """Starts taking calls, and returns."""
        ...

    async def drain(self, grace: float) -> None:
        """Stops: closes the ports, lets calls in flight go on for `grace` seconds, then ends them with UNAVAILABLE.

        By then, no more calls are admitted. Also releases addresses that were bound but never served.
        """
        ...


class MakeListener(Protocol):
    """Makes a listener."""

    def __call__(
        self,
        services: Sequence[Service],
        admission: Admission,
        limits: LimitsConfig,
        certificates: CertificateFiles | None,
        way: Way,
        /,
    ) -> Listener:
        """Returns an unbound listener for services.

        `admission` admits calls until the server drains. With certificates, connections over TCP are encrypted. The
        listener counts its bytes and calls in `way`.
        """
        ...


def make_all_families(device: Device, parallel: ForkJoin) -> Mapping[str, Family]:
    """Returns the families of ops and layers on a device, by name."""
    ops = make_families(device, parallel)
    return {**ops, **make_layer_families(device, ops)}


def make_device_reducer(device: Device) -> ConvertingReducer | None:
    """Returns the reducer that adds up gradients on a device; None if it has none, as the host."""
    if isinstance(device, CpuDevice):
        return None
    from gradserve_server.devices.cuda.device import CudaDevice
    from gradserve_server.devices.cuda.reduction import CudaReducer

    return CudaReducer(device) if isinstance(device, CudaDevice) else None


def _new_seed() -> int:
    return secrets.randbits(63)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The replaceable parts of one server.

    Attributes:
        inventory: The devices of the machine.
        choose_device: Returns the device for ops, given the configured name, the host and the inventory.
        share_gpu: Returns the opener of clients' memory on that device; None if it is not a GPU.
        make_families: Returns the families of ops and layers for a device and the threads that share a piece of work.
        make_device_reducer: Returns the reducer that adds up gradients on that device, or None.
        clock: The clock of leases.
        wall_clock: The time in nanoseconds since 1970, for the order of sharded accumulators of one name.
        new_id: Returns a unique id.
        new_seed: Returns an unpredictable number of 63 bits.
        interceptors: Additional interceptors of every call, after the built-in ones.
        make_listener: Makes the listener for the services; it is bound later.
        tracer_provider: The provider of the server's tracer, which enables tracing. None: OpenTelemetry's global
            provider, if the configuration asks for tracing.
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


def open_state(config: StateConfig) -> "ServerState | None":
    """Opens the configured state directory; returns None if there is none.

    Raises:
        StateError: It cannot be made, opened or used.
    """
    if config.state_dir is None:
        return None
    try:
        store = StateStore(StateDirectory(Path(config.state_dir)))
    except OSError as error:
        raise StateError(f"cannot use the state directory {config.state_dir}: {reason_of(error)}") from error
    return ServerState(store, Durability[config.durability.upper()])


def backups_of(config: StateConfig, wall_clock: Callable[[], int]) -> BackupSchedule | None:
    """Returns the schedule of the configured backups; None if there are to be none."""
    if config.backup_dir is None or config.state_dir is None:
        return None
    folder, keep = Path(config.backup_dir), config.backup_keep
    return BackupSchedule(Path(config.state_dir), folder, config.backup_interval_seconds, keep, wall_clock)


class ServerState:
    """An open state directory.

    Attributes:
        store: The directory.
        accumulators: The journals of the accumulators.
        parameters: The journals of the parameters.
        layers: The journals of the layers.
    """

    def __init__(self, store: StateStore, default: Durability) -> None:
        self.store = store
        self.accumulators = AccumulatorJournals(store, default)
        self.parameters = ParametersJournals(store, default)
        self.layers = LayerJournals(store, default)


def renew_incarnations(database: sqlite3.Connection, new_id: Callable[[], str], now: int) -> None:
    """Gives the resources of a restored backup other incarnations, so that no client takes them for what it had.

    Those of sharded accumulators, and of the shards of parameters with another home, stay: the other servers know them
    by these. Sharded parameters get another one at their home, later than those before, because shards on other servers
    may be ahead of the backup: their versions must not be mixed with those of this home.

    Args:
        database: The database of the copy, in a transaction.
        new_id: Returns a unique id.
        now: The time in nanoseconds since 1970.
    """
    for kind in ("accumulator", "parameters", "layer"):
        spec = "config" if kind == "layer" else "spec"
        for number, incarnation, text in database.execute(f"SELECT id, incarnation, {spec} FROM {kind}").fetchall():
            record = json.loads(text)
            is_sharded = kind != "layer" and bool(record.get("num_shards"))
            if is_sharded and (kind == "accumulator" or record.get("follows")):
                continue
            renewed = later_incarnation(incarnation, new_id(), now) if is_sharded else new_id()
            database.execute(f"UPDATE {kind} SET incarnation = ? WHERE id = ?", (renewed, number))
            if kind == "parameters":
                database.execute(
                    "UPDATE parameters_part SET home = ? WHERE parameters = ? AND home = ?",
                    (renewed, number, incarnation),
                )


@dataclass(frozen=True)
class ResourceCounts:
    """Resource counts for the status page and metrics. Read on the event loop."""

    budgets: Budgets
    registry: AccumulatorRegistry
    parameters: ParametersRegistry
    sockets: FairSockets
    clients: ClientLeases
    pool: BufferPool

    def memory(self) -> Iterable[MemoryStatus]:
        """Returns bytes by purpose. The purposes up to "calls" share the limit of "all tensors"."""
        budgets, sockets, used = self.budgets, self.sockets, self.budgets.memory.used_for
        found = [
            MemoryStatus("all tensors", budgets.memory.used, budgets.memory.limit),
            MemoryStatus("stored tensors", used[Purpose.STORED]),
            MemoryStatus("accumulators", used[Purpose.ACCUMULATORS]),
            MemoryStatus("layers", used[Purpose.LAYERS]),
            MemoryStatus("calls", used[Purpose.COMPUTING]),
            MemoryStatus("bookkeeping", budgets.bookkeeping.used, budgets.bookkeeping.limit),
            MemoryStatus("clients' shared memory", sockets.region_bytes.used, sockets.region_bytes.limit),
            MemoryStatus("kept for later", self.pool.idle_bytes),
        ]
        if (device := budgets.device_memory) is not None:
            found.append(MemoryStatus("device: all", device.used, device.limit))
            found += [MemoryStatus(f"device: {purpose.value}", used) for purpose, used in device.used_for.items()]
        return found

    def counts(self) -> Mapping[str, tuple[int, int]]:
        """Returns the number in use and the limit for each kind of resource; 0 means no limit of its own.

        Parameters count as accumulators, too.
        """
        budgets, sockets = self.budgets, self.sockets
        limited = {
            "handles": budgets.handles,
            "accumulators": self.registry.factory.count,
            "layers": budgets.layers,
            "waiters": self.registry.factory.waiters,
            "socket_connections": sockets.connections,
            "regions": sockets.regions,
        }
        counts = {kind: (budget.used, budget.limit) for kind, budget in limited.items()}
        return {**counts, "parameters": (len(self.parameters), 0), "client_leases": (len(self.clients), 0)}


_log = logging.getLogger(__name__)

RESERVED = 400
"""Descriptors for state files, logs, certificates, listeners, the HTTP port and libraries."""
_LEAST_CONNECTIONS = 16


def within_descriptors(limits: LimitsConfig, num_addresses: int) -> LimitsConfig:
    """Lowers `max_connections` if clients could otherwise take all file descriptors of the process.

    Args:
        limits: The configured limits.
        num_addresses: The number of gRPC addresses. Each may have `max_connections`; the sockets may have as many, and
            their strands as many again.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return limits
    room = (descriptors - max_regions() - RESERVED) // (num_addresses + 2)
    allowed = max(room, _LEAST_CONNECTIONS)
    if limits.max_connections <= allowed:
        return limits
    was_given = "max_connections" in limits.model_fields_set
    _log.log(
        logging.WARNING if was_given else logging.DEBUG,
        "max_connections is %d, not %d: this process may open %d files (ulimit -n)",
        allowed,
        limits.max_connections,
        descriptors,
    )
    return limits.model_copy(update={"max_connections": allowed})
