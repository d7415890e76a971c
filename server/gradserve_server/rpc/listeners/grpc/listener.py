"""The gRPC listener: makes the handlers, serves, ends idle connections, and drains."""

import asyncio
import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

import gradserve
from gradserve_protocol.address import Address
from gradserve_protocol.lasting import lasting_task
from gradserve_protocol.tls import CertificateFiles
from gradserve_server.config import LimitsConfig
from gradserve_server.observe.calls import Way
from gradserve_server.rpc.boundary.chain import Service
from gradserve_server.rpc.boundary.interceptors import Admission
from gradserve_server.rpc.listeners.grpc.calls import IdleConnections
from gradserve_server.rpc.listeners.grpc.endpoint import LOOPBACKS, Endpoint, LastingEndpoint, port_credentials
from gradserve_server.rpc.listeners.grpc.flow import Traffic
from gradserve_server.rpc.listeners.grpc.handlers import Arrivals, UnknownMethods, make_handler

_log = logging.getLogger(__name__)

_MIN_PING_INTERVAL_MS = 10_000
"""The shortest interval of pings without a call in flight. gRPC's default of 5 minutes outlasts most firewalls."""
_PENDING = 8
"""The number of clients that may fill their connections with calls at once. The calls wait in one queue, and once that
is full, gRPC cancels calls of all clients."""
_HANDSHAKE_MS = 20_000
"""Milliseconds that a client may take for its handshake; gRPC's default is 2 minutes."""

_GRPC_LOGGERS = ("grpc._cython.cygrpc", "asyncio")
"""gRPC's own logger, and the one to which asyncio reports failures of gRPC's tasks."""


@dataclass(frozen=True)
class ClientKeepalive:
    """Keepalive settings, by which the server detects that the machine or the network of a client is gone.

    Otherwise its calls would go on waiting, and would take rounds that nobody receives. The default interval of gRPC is
    two hours.

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
        self._arrivals = Arrivals(admission)
        asks_clients = certificates is not None and certificates.current().ca is not None
        self.traffic = Traffic.within(limits, way)
        """Its calls, and their messages."""
        self._idle = IdleConnections(limits.max_connections, self.traffic.calls)
        self._ports: set[int] = set()
        self._keeping_room: asyncio.Task[None] | None = None
        handlers = [
            *(make_handler(service, self.traffic, asks_clients=asks_clients) for service in services),
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
        # Calls that have arrived but not begun. If the first limit were lower, gRPC would cancel some at random.
        ("grpc.server.max_pending_requests", _PENDING * limits.max_connection_calls),
        ("grpc.server.max_pending_requests_hard_limit", _PENDING * limits.max_connection_calls),
    )


class ClientFaults(logging.Filter):
    """Demotes errors in gRPC's log that clients can cause at will to debug lines without tracebacks.

    Clients cause them by leaving while they are answered, and with metadata or method names that are not UTF-8.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns True if a record should be logged."""
        error = (record.exc_info and record.exc_info[1]) or record.msg
        if not isinstance(error, grpc.aio.InternalError | UnicodeDecodeError) or not _is_raised_in_grpc(error):
            return True
        record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        record.exc_info = record.exc_text = None
        return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)


def quiet_client_faults() -> None:
    """Adds the filter to gRPC's loggers, once."""
    for logger in map(logging.getLogger, _GRPC_LOGGERS):
        if not any(isinstance(each, ClientFaults) for each in logger.filters):
            logger.addFilter(ClientFaults())


def _is_raised_in_grpc(error: Exception) -> bool:
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(files) and "_cygrpc" in files[-1]
