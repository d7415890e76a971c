"""ServerService: the server's version, devices, limits and load."""

from collections.abc import Callable

from gradserve.v1 import server_messages_pb2 as messages_pb2
from gradserve.v1 import status_messages_pb2
from gradserve.wire.messages import encode_duration
from gradserve_server.config import LeaseConfig, LimitsConfig
from gradserve_server.devices.compute import Compute
from gradserve_server.devices.inventory import Inventory
from gradserve_server.observe.status.source import StatusSource
from gradserve_server.resources.cluster import Member
from gradserve_server.rpc.boundary.chain import Call
from gradserve_server.rpc.server_info.device_figures import DeviceFigures
from gradserve_server.rpc.server_info.status import decode_status_request, encode_status
from gradserve_server.rpc.server_info.usage import Usage
from gradserve_server.rpc.sockets.addresses import SocketAddresses


class ServerServicer:
    """Describes the server. The protos say what each method does."""

    def __init__(
        self,
        *,
        version: str,
        inventory: Inventory,
        device: str,
        figures: DeviceFigures,
        ops_prepared: Callable[[], bool],
        limits: LimitsConfig,
        leases: LeaseConfig,
        usage: Usage,
        uptime: Callable[[], float],
        sockets: SocketAddresses,
        incarnation: str,
        status: StatusSource,
        compute: Compute,
        http_url: Callable[[], str],
        member: Member | None,
        upstream: str,
    ) -> None:
        """Takes the name of the `device` that ops run on, whether they are prepared, and an `uptime` in seconds."""
        self._http_url = http_url
        self._upstream = upstream
        self._member = None
        if member is not None:
            self._member = messages_pb2.ClusterMember(cluster=member.cluster, index=member.index, size=member.size)
        self._status = status
        self._compute = compute
        self._version = version
        self._incarnation = incarnation
        self._device = device
        self._figures = figures
        self._ops_prepared = ops_prepared
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
        self._usage = usage
        self._uptime = uptime
        self._sockets = sockets

    async def GetServerInfo(
        self, request: messages_pb2.GetServerInfoRequest, call: Call
    ) -> messages_pb2.GetServerInfoResponse:
        return messages_pb2.GetServerInfoResponse(
            version=self._version,
            incarnation=self._incarnation,
            devices=self._devices,
            device=self._device,
            why_no_gpu=self._why_no_gpu,
            device_usage=self._figures.message(),
            ops_prepared=self._ops_prepared(),
            limits=self._limits,
            usage=self._usage.of_all(),
            identities=self._usage.of_identities(call.identity) if request.with_shares else (),
            containers=self._usage.of_containers(call.identity) if request.with_shares else (),
            uptime=encode_duration(self._uptime()),
            sockets=self._sockets.message(),
            http_url=self._http_url(),
            member=self._member,
            upstream=self._upstream,
        )

    async def GetServerStatus(
        self, request: status_messages_pb2.GetServerStatusRequest, call: Call
    ) -> status_messages_pb2.GetServerStatusResponse:
        status = await self._status.picture(decode_status_request(request, call.identity))
        return await self._compute.run_in_thread(encode_status, status)
