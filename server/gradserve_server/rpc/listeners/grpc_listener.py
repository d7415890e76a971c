"""The gRPC listener."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import gradserve
from gradserve.address import Address
from gradserve.lasting import lasting_task
from gradserve.security.certificates import CertificateFiles
from gradserve_server.config import LimitsConfig
from gradserve_server.observe.traffic import Way
from gradserve_server.rpc.boundary.admission import Admission
from gradserve_server.rpc.boundary.grpc_log import quiet_client_faults
from gradserve_server.rpc.boundary.handlers import UnknownMethods, certificate, make_handler, no_certificate
from gradserve_server.rpc.boundary.service import Service
from gradserve_server.rpc.boundary.traffic import Traffic
from gradserve_server.rpc.listeners.arrivals import Arrivals
from gradserve_server.rpc.listeners.credentials import port_credentials
from gradserve_server.rpc.listeners.endpoint import Endpoint, LastingEndpoint
from gradserve_server.rpc.listeners.idle_connections import IdleConnections
from gradserve_server.rpc.listeners.ports import LOOPBACKS

_log = logging.getLogger(__name__)

_MIN_PING_INTERVAL_MS = 10_000
"""The least interval of pings without a call under way; gRPC's default of 5 minutes outlasts most firewalls."""
_PENDING = 8
"""As many clients may begin as many calls at once as a connection may have. All wait in one queue, and where that is
full, gRPC cancels the calls of everybody."""
_HANDSHAKE_MS = 20_000
"""How long a client may take to begin; gRPC's default is 2 minutes."""


@dataclass(frozen=True)
class ClientKeepalive:
    """The detection of clients that are gone.

    Otherwise the calls of a client whose machine or network is gone would wait, and take rounds, for nobody. gRPC's own
    interval is two hours.

    Attributes:
        interval: Seconds without traffic before a connection is asked for a sign of life.
        timeout: Seconds that the server then waits for one.
    """

    interval: float = 30.0
    timeout: float = 15.0


class GrpcListener:
    """A `Listener` for gRPC, over TCP and Unix sockets."""

    def __init__(
        self,
        services: Sequence[Service],
        admission: Admission,
        limits: LimitsConfig,
        certificates: CertificateFiles | None = None,
        way: Way | None = None,
        *,
        keepalive: ClientKeepalive = ClientKeepalive(),
        loopbacks: Sequence[str] = LOOPBACKS,
    ) -> None:
        """Takes the services, what counts their bytes, and the addresses of localhost."""
        self._arrivals = Arrivals(admission)
        asks_clients = certificates is not None and certificates.current().ca is not None
        peer = certificate if asks_clients else no_certificate
        self.traffic = Traffic.within(limits, way)
        """The messages of its calls."""
        self._idle = IdleConnections(limits.max_connections, self.traffic.calls)
        self._ports: set[int] = set()
        self._keeping_room: asyncio.Task[None] | None = None
        handlers = [
            *(make_handler(service, self.traffic, peer) for service in services),
            UnknownMethods(gradserve.__version__),
        ]
        options = _options(limits, keepalive)
        credentials = None if certificates is None else port_credentials(certificates)
        self._endpoint = LastingEndpoint(
            partial(Endpoint, handlers, (self._arrivals,), options, loopbacks, credentials),
            is_encrypted=certificates is not None,
        )

    def bind(self, addresses: Sequence[Address]) -> list[Address]:
        """Binds to addresses; see `Listener.bind`."""
        bound = self._endpoint.bind(addresses)
        self._ports = {each.port for each in bound if not each.path}
        return bound

    async def serve(self) -> None:
        """Starts taking calls, and returns."""
        quiet_client_faults()
        await self._endpoint.start()
        keep_room = partial(self._idle.keep_room, self._ports)
        self._keeping_room = lasting_task("keeping room for new connections", keep_room, _log)

    async def drain(self, grace: float) -> None:
        """Stops listening; see `Listener.drain`."""
        end = time.monotonic() + grace
        if self._keeping_room is not None:
            self._keeping_room.cancel()
            await asyncio.gather(self._keeping_room, return_exceptions=True)
        await self._arrivals.settle(self._endpoint.probe)
        await self._endpoint.stop(max(end - time.monotonic(), 0), self._arrivals.refuse)


def _options(limits: LimitsConfig, keepalive: ClientKeepalive) -> tuple[tuple[str, Any], ...]:
    return (
        ("grpc.max_receive_message_length", int(limits.max_message_bytes)),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", int(keepalive.interval * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive.timeout * 1000)),
        ("grpc.http2.ping_timeout_ms", int(keepalive.timeout * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_concurrent_streams", limits.max_connection_calls),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        # Calls that have arrived and not begun. If the first were less, gRPC would cancel some at random.
        ("grpc.server.max_pending_requests", _PENDING * limits.max_connection_calls),
        ("grpc.server.max_pending_requests_hard_limit", _PENDING * limits.max_connection_calls),
    )
