"""ServerService: the server's version, devices, limits, load and status."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from pathlib import Path

from google.protobuf.timestamp_pb2 import Timestamp

from gradserve_protocol.messages import encode_duration, fill
from gradserve_protocol.server_status import ServerLog, ServerStatus
from gradserve_protocol.v1 import server_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import status_messages_pb2
from gradserve_server.config import LeaseConfig, LimitsConfig
from gradserve_server.devices.compute import Compute
from gradserve_server.devices.device import Device
from gradserve_server.devices.inventory import Inventory
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.observe.logs import LogMemory, LogRequest, check_reader
from gradserve_server.observe.status.snapshot import Order, StatusRequest
from gradserve_server.observe.status.source import StatusSource, disk_of
from gradserve_server.resources.budget import Budget, Purpose
from gradserve_server.rpc.accumulators.gradients import decode_request_id
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.sockets.service import SocketAddresses
from gradserve_server.security.identity import Identity
from gradserve_server.tensors.eviction import Evictor

_MOST_IDENTITIES = 1000
_MOST_CONTAINERS = 100
_MOST_COMPARED = 1000
"""The most containers to compare, because a client can make a hundred thousand."""


@dataclass(frozen=True)
class Usage:
    """The use of the budgets of a server."""

    memory: Budget
    handles: Budget
    accumulators: Budget
    waiters: Budget
    layers: Budget
    bookkeeping: Budget
    device_memory: Budget | None = None
    num_parameters: Callable[[], int] = lambda: 0

    def of_all(self) -> messages_pb2.ServerUsage:
        """Returns the use by everybody."""
        return messages_pb2.ServerUsage(
            num_bytes=self.memory.used,
            num_handles=self.handles.used,
            num_accumulators=self.accumulators.used,
            num_waiters=self.waiters.used,
            num_layers=self.layers.used,
            bookkeeping_bytes=self.bookkeeping.used,
            num_parameters=self.num_parameters(),
        )

    def of_identities(self, caller: Identity) -> list[messages_pb2.ShareUsage]:
        """Returns the use by the caller; for an admin of all containers, by each identity that uses anything."""
        if not caller.name:
            return []
        names = {caller.name}
        if caller.reaches_all:
            budgets = [self.memory, self.handles, self.accumulators, self.waiters, self.layers, self.bookkeeping]
            budgets += [] if self.device_memory is None else [self.device_memory]
            names = {name for budget in budgets for name, share in budget.identities.items() if share.held}
        largest = nlargest(_MOST_IDENTITIES, names, key=self.memory.held_by)
        return [self._share(name, Budget.held_by) for name in largest]

    def of_containers(self, caller: Identity) -> list[messages_pb2.ShareUsage]:
        """Returns the use in the largest containers in which the caller has a role."""
        # Everything in a container takes some bookkeeping.
        compared, held = list(islice(self.bookkeeping.containers, _MOST_COMPARED)), self.bookkeeping.held_in
        names = [name for name in compared if caller.role_in(name) is not None and held(name)]
        largest = nlargest(_MOST_CONTAINERS, names, key=self.memory.held_in)
        return [self._share(name, Budget.held_in) for name in largest]

    def _share(self, name: str, held_by: Callable[[Budget, str], int]) -> messages_pb2.ShareUsage:
        return messages_pb2.ShareUsage(
            name=name,
            num_bytes=held_by(self.memory, name),
            num_handles=held_by(self.handles, name),
            num_accumulators=held_by(self.accumulators, name),
            num_waiters=held_by(self.waiters, name),
            num_layers=held_by(self.layers, name),
            bookkeeping_bytes=held_by(self.bookkeeping, name),
            device_bytes=0 if self.device_memory is None else held_by(self.device_memory, name),
        )


@dataclass(frozen=True)
class DeviceFigures:
    """The figures of the machine's devices, and of the memory of the ops' device.

    Attributes:
        device: The ops' device.
        evictor: Keeps its memory within the limit; None for a device without memory of its own.
        inventory: The devices of the machine.
        ops_prepared: Returns True once the kernels of ops are loaded or compiled.
    """

    device: Device
    evictor: Evictor | None
    inventory: Inventory
    ops_prepared: Callable[[], bool]

    def message(self) -> messages_pb2.DeviceUsage | None:
        """Returns the figures as a message; None for the host."""
        usage = self.device.usage()
        if usage is None or self.evictor is None:
            return None
        used = self.evictor.device.used_for
        return messages_pb2.DeviceUsage(
            max_bytes=self.evictor.device.limit,
            computing_bytes=used[Purpose.COMPUTING],
            stored_bytes=used[Purpose.STORED],
            accumulator_bytes=used[Purpose.ACCUMULATORS],
            layer_bytes=used[Purpose.LAYERS],
            cached_bytes=usage.cached_bytes,
            other_bytes=usage.other_bytes,
            num_evicted=self.evictor.num_evicted,
            evicted_bytes=self.evictor.evicted_bytes,
            num_compiled=usage.num_compiled,
            num_launches=usage.num_launches,
            bytes_to_device=usage.bytes_to_device,
            bytes_to_host=usage.bytes_to_host,
            wait=encode_duration(usage.wait_seconds),
        )


_ORDERS = {
    status_messages_pb2.GetServerStatusRequest.ORDER_UNSPECIFIED: Order.LATEST,
    status_messages_pb2.GetServerStatusRequest.ORDER_NAME: Order.NAME,
    status_messages_pb2.GetServerStatusRequest.ORDER_RATE: Order.RATE,
    status_messages_pb2.GetServerStatusRequest.ORDER_WAITING: Order.WAITING,
    status_messages_pb2.GetServerStatusRequest.ORDER_BYTES: Order.BYTES,
}


class ServerServicer:
    """Describes the server. The protos say what each method does."""

    def __init__(
        self,
        status: StatusSource,
        figures: DeviceFigures,
        usage: Usage,
        limits: LimitsConfig,
        leases: LeaseConfig,
        sockets: SocketAddresses,
        compute: Compute,
        state_path: Path | None,
        logs: LogMemory,
    ) -> None:
        self._status = status
        self._logs = logs
        self._state_path = state_path
        self._figures = figures
        self._usage = usage
        self._sockets = sockets
        self._compute = compute
        self._member = None
        if (member := status.facts.member) is not None:
            self._member = messages_pb2.ClusterMember(cluster=member.cluster, index=member.index, size=member.size)
        inventory = figures.inventory
        self._devices = [
            messages_pb2.Device(
                name=device.name,
                description=device.description,
                total_memory_bytes=device.total_memory_bytes,
            )
            for device in inventory.devices
        ]
        self._why_no_gpu = inventory.why_no_gpu or ""
        self._limits = messages_pb2.ServerLimits(
            max_message_bytes=limits.max_message_bytes,
            inline_limit_bytes=limits.inline_limit_bytes,
            max_bytes=limits.max_bytes,
            max_handles=limits.max_handles,
            max_accumulators=limits.max_accumulators,
            max_waiters=limits.max_waiters,
            max_layers=limits.max_layers,
            id_window=limits.id_window,
            default_lease=encode_duration(leases.default_lease_seconds),
            max_lease=encode_duration(leases.max_lease_seconds),
            undelivered_lease=encode_duration(limits.undelivered_lease_seconds),
            client_lease=encode_duration(leases.client_lease_seconds),
            max_bookkeeping_bytes=limits.bookkeeping_bytes,
        )

    async def GetServerInfo(
        self, request: messages_pb2.GetServerInfoRequest, call: Call
    ) -> messages_pb2.GetServerInfoResponse:
        facts = self._status.facts
        now = Timestamp()
        now.FromNanoseconds(time.time_ns())
        disk = None
        if request.with_shares and self._state_path is not None:
            disk = await self._compute.run_in_thread(_disk_usage, self._state_path)  # a file system may be slow
        return messages_pb2.GetServerInfoResponse(
            version=facts.version,
            incarnation=facts.incarnation,
            devices=self._devices,
            device=facts.device,
            why_no_gpu=self._why_no_gpu,
            device_usage=self._figures.message(),
            ops_prepared=self._figures.ops_prepared(),
            limits=self._limits,
            usage=self._usage.of_all(),
            identities=self._usage.of_identities(call.identity) if request.with_shares else (),
            containers=self._usage.of_containers(call.identity) if request.with_shares else (),
            uptime=encode_duration(facts.uptime()),
            sockets=self._sockets.message(),
            http_url=facts.http_url(),
            member=self._member,
            upstream=facts.upstream,
            time=now,
            state_disk=disk,
        )

    async def GetServerStatus(
        self, request: status_messages_pb2.GetServerStatusRequest, call: Call
    ) -> status_messages_pb2.GetServerStatusResponse:
        status = await self._status.picture(decode_status_request(request, call.identity))
        return await self._compute.run_in_thread(encode_status, status)

    async def GetLog(
        self, request: status_messages_pb2.GetLogRequest, call: Call
    ) -> status_messages_pb2.GetLogResponse:
        check_reader(call.identity)
        wanted = LogRequest(
            max_lines=request.max_lines or LogRequest.max_lines,
            level=request.level,
            contains=request.contains,
            after=request.after,
        )
        message = status_messages_pb2.GetLogResponse()
        fill(message, ServerLog(self._logs.latest(wanted), self._status.facts.incarnation))
        return message


def _disk_usage(path: Path) -> messages_pb2.DiskUsage | None:
    found = disk_of(path)
    return None if found is None else messages_pb2.DiskUsage(free_bytes=found.free, total_bytes=found.total)


def decode_status_request(request: status_messages_pb2.GetServerStatusRequest, user: Identity) -> StatusRequest:
    """Reads a request for the status.

    Raises:
        InvalidArgumentError: A maximum is larger than allowed, or the order is unknown.
    """
    order = _ORDERS.get(request.order)
    if order is None:
        raise InvalidArgumentError(f"expected an order of GetServerStatusRequest, got {request.order}", field="order")
    default = StatusRequest()
    return StatusRequest(
        user=user,
        container=request.container,
        name_contains=request.name_contains,
        order=order,
        max_accumulators=request.max_accumulators or default.max_accumulators,
        max_rounds=request.max_rounds or default.max_rounds,
        max_workers=request.max_workers or default.max_workers,
        max_past_runs=request.max_past_runs,
        call=decode_request_id(request.request_id, b"", user) if request.HasField("request_id") else None,
    )


def encode_status(status: ServerStatus) -> status_messages_pb2.GetServerStatusResponse:
    """Returns a status as a message."""
    message = status_messages_pb2.GetServerStatusResponse()
    fill(message, status)
    return message
