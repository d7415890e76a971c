"""Operations on the server itself, and the servers of a client that has several."""

from collections.abc import Iterable, Mapping, Sequence

from google.protobuf.duration_pb2 import Duration

from gradserve.calls.exchange import DescribeTransport, Operation, Unary
from gradserve.calls.identity import CallId
from gradserve.conversion.plain import as_choice, as_integer, as_text
from gradserve.results import Device, ServerInfo, TransportInfo
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import InvalidArgumentError
from gradserve_protocol.messages import read
from gradserve_protocol.placement import home_of
from gradserve_protocol.server_status import ServerLog, ServerStatus
from gradserve_protocol.v1 import server_messages_pb2 as messages_pb2
from gradserve_protocol.v1 import socket_messages_pb2, status_messages_pb2

_FIELD = "address"
_ORDERS = ("latest", "name", "rate", "waiting", "bytes")
_LEVELS = ("debug", "info", "warning", "error")
_MAXIMA = {
    "max_accumulators": range(1, 1001),
    "max_rounds": range(1, 1001),
    "max_workers": range(1, 1001),
    "max_past_runs": range(257),
}
_Request = status_messages_pb2.GetServerStatusRequest


class Cluster:
    """The servers in the order of the client's list. A single one need not be in a cluster.

    Safe to use from several threads: servers may be asked twice.
    """

    def __init__(self, addresses: Sequence[str] = ("",)) -> None:
        """Keeps the servers' addresses as error messages name them."""
        self._addresses = addresses
        self._members: dict[int, messages_pb2.ClusterMember] = {}

    @property
    def size(self) -> int:
        """The number of servers."""
        return len(self._addresses)

    def home_of(self, container: str, name: str) -> int:
        """Returns the index of the server that has an accumulator."""
        return 0 if self.size == 1 else home_of(container, name, self.size)

    def member(self, target: int) -> Operation[str]:
        """Returns the text by which requests name a server, after it was asked once; empty for a single server.

        Raises:
            InvalidArgumentError: It is not the server that the client's list says, or in another cluster.
        """
        if self.size == 1:
            return ""
        if target not in self._members:
            request = messages_pb2.GetServerInfoRequest()
            call = Unary("ServerService", "GetServerInfo", request, target=target)
            reply: messages_pb2.GetServerInfoResponse = yield call
            self._check(target, reply)
            self._members[target] = reply.member
        return member_text(self._members[target])

    def members(self, targets: Iterable[int]) -> Operation[dict[int, str]]:
        """Returns what `member` does, for each of several servers."""
        found: dict[int, str] = {}
        for target in targets:
            found[target] = yield from self.member(target)
        return found

    def _check(self, target: int, reply: messages_pb2.GetServerInfoResponse) -> None:
        found, where = reply.member, f"the server at {self._addresses[target]}"
        if not reply.HasField("member"):
            raise InvalidArgumentError(
                f"{where} is in no cluster, and the client has a list of {self.size} servers: start it with "
                f"--cluster NAME --cluster-index {target} --cluster-size {self.size}",
                field=_FIELD,
                code="GS_WRONG_SERVER",
            )
        if (found.index, found.size) != (target, self.size):
            raise InvalidArgumentError(
                f"{where} is server {found.index} of {found.size} in cluster {found.cluster!r}, and {target} of "
                f"{self.size} in the client's list: give all servers of the cluster in their order",
                field=_FIELD,
                code="GS_WRONG_SERVER",
            )
        for other, member in list(self._members.items()):
            if member.cluster != found.cluster:
                raise InvalidArgumentError(
                    f"{where} is in cluster {found.cluster!r}, and {self._addresses[other]} in cluster "
                    f"{member.cluster!r}",
                    field=_FIELD,
                    code="GS_WRONG_SERVER",
                )


def member_text(member: messages_pb2.ClusterMember) -> str:
    """Returns the text by which requests name a member of a cluster."""
    return f"{member.cluster} {member.index}/{member.size}"


def server_info() -> Operation[ServerInfo]:
    """Describes the server."""
    request = messages_pb2.GetServerInfoRequest(with_shares=True)
    reply: messages_pb2.GetServerInfoResponse = yield Unary("ServerService", "GetServerInfo", request)
    transport: TransportInfo = yield DescribeTransport()
    return ServerInfo(
        version=reply.version,
        devices=tuple(Device(device.name, device.description, device.total_memory_bytes) for device in reply.devices),
        device=reply.device,
        ops_prepared=reply.ops_prepared,
        limits=_numbers(reply.limits),
        usage=_numbers(reply.usage),
        uptime=_seconds(reply.uptime),
        sockets=_addresses(reply.sockets),
        transport=transport,
        incarnation=reply.incarnation,
        identities=_shares(reply.identities),
        containers=_shares(reply.containers),
        why_no_gpu=reply.why_no_gpu,
        device_usage=_numbers(reply.device_usage) if reply.HasField("device_usage") else {},
        http_url=reply.http_url,
        member=member_text(reply.member) if reply.HasField("member") else "",
        upstream=reply.upstream,
        time=reply.time.ToNanoseconds() / 1e9,
        state_disk=_numbers(reply.state_disk) if reply.HasField("state_disk") else {},
    )


def server_status(
    container: str,
    name_contains: str,
    order: str,
    maxima: Mapping[str, int],
    call: CallId | None,
) -> Operation[ServerStatus]:
    """Returns a picture of the server at work with at most so many of each kind, and what it knows of a call."""
    chosen = as_choice(order, _ORDERS, Argument("order"))
    request = _Request(
        container=as_text(container, Argument("container")),
        name_contains=as_text(name_contains, Argument("name_contains")),
        order="ORDER_UNSPECIFIED" if chosen == "latest" else f"ORDER_{chosen.upper()}",
    )
    for name, most in maxima.items():
        setattr(request, name, as_integer(most, Argument(name), _MAXIMA[name]))
    if call is not None:
        request.request_id.client_id, request.request_id.sequence = call
    reply: status_messages_pb2.GetServerStatusResponse = yield Unary("ServerService", "GetServerStatus", request)
    return read(reply, ServerStatus)


def server_log(max_lines: int, level: str, contains: str, after: int) -> Operation[ServerLog]:
    """Returns lines of the server's log."""
    request = status_messages_pb2.GetLogRequest(
        max_lines=as_integer(max_lines, Argument("max_lines"), range(1, 1001)),
        level=as_choice(level, _LEVELS, Argument("level")),
        contains=as_text(contains, Argument("contains")),
        after=as_integer(after, Argument("after"), range(1 << 63)),
    )
    reply: status_messages_pb2.GetLogResponse = yield Unary("ServerService", "GetLog", request)
    return read(reply, ServerLog)


def _addresses(sockets: socket_messages_pb2.SocketAddresses) -> tuple[str, ...]:
    tcp = tuple(f"{_host(each.host)}:{each.port}" for each in sockets.tcp)
    return (*tcp, f"unix:{sockets.unix_path}") if sockets.unix_path else tcp


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host or "*"


def _numbers(
    message: messages_pb2.ServerLimits | messages_pb2.ServerUsage | messages_pb2.DeviceUsage | messages_pb2.DiskUsage,
) -> dict[str, float]:
    values = {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
    return {name: _seconds(value) if isinstance(value, Duration) else value for name, value in values.items()}


def _shares(shares: Iterable[messages_pb2.ShareUsage]) -> dict[str, dict[str, int]]:
    names = [field.name for field in messages_pb2.ShareUsage.DESCRIPTOR.fields if field.name != "name"]
    return {share.name: {name: getattr(share, name) for name in names} for share in shares}


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9
