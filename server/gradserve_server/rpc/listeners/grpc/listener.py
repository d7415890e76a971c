"""The gRPC listener: reads requests, runs the chain around every call, hands replies to gRPC, and drains."""

import asyncio
import contextlib
import logging
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor

import gradserve
from gradserve_protocol.address import Address
from gradserve_protocol.lasting import lasting_task
from gradserve_protocol.tensors import WithContents, encode_message
from gradserve_protocol.tls import CertificateFiles
from gradserve_server.config import LimitsConfig
from gradserve_server.errors import InvalidArgumentError, ServiceError, UnavailableError
from gradserve_server.limits import MAX_NAME_BYTES
from gradserve_server.observe.calls import Way
from gradserve_server.rpc.boundary.chain import Call, Codec, Service, StreamedCall
from gradserve_server.rpc.boundary.interceptors import Admission
from gradserve_server.rpc.boundary.messages import RequestReader
from gradserve_server.rpc.listeners.grpc.calls import (
    Context,
    IdleConnections,
    certificate_of,
    credentials_of,
    deadline_of,
    end_with,
    origin_of,
    time_left,
    when_ended,
    write,
)
from gradserve_server.rpc.listeners.grpc.endpoint import LOOPBACKS, Endpoint, LastingEndpoint
from gradserve_server.rpc.listeners.grpc.flow import SMALL_BYTES, Traffic, UnreadReplies

_BY_DEADLINE_SECONDS = 0.1
"""A call that ends this shortly before its deadline ended because of it: the clocks of client and server differ."""
_HEALTH_CHECK = "grpc.health.v1.Health.Check"


_QUIET_SECONDS = (0.05, 0.5)
"""Seconds without a new call before the drain continues: normally, and after many calls."""
_MANY_CALLS = 250
"""The calls in the last second that count as many. After these, or on a busy machine, some clients are slow to call
again."""
_CHECK_SECONDS = 0.01
_MAX_SETTLE_SECONDS = 2.0
_HEALTH_METHODS = "/grpc.health.v1.Health/"

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


def make_handler(service: Service, traffic: Traffic, *, asks_clients: bool = False) -> grpc.GenericRpcHandler:
    """Returns the handler of all methods of a service.

    Args:
        service: The service.
        traffic: The calls of all services, and their messages.
        asks_clients: Whether the server asks its clients for certificates.
    """
    return grpc.method_handlers_generic_handler(
        service.descriptor.full_name,
        {
            method.name: _method_handler(method, service, traffic, asks_clients=asks_clients)
            for method in service.descriptor.methods
        },
    )


class UnknownMethods(grpc.GenericRpcHandler):
    """Answers calls to unknown methods, after all other handlers, with the method and the server's version."""

    def __init__(self, version: str) -> None:
        self._version = version

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        """Returns a handler that ends a call with UNIMPLEMENTED."""
        method = str(cast("Any", handler_call_details).method)[:MAX_NAME_BYTES].strip("/").replace("/", ".")

        async def refuse(_requests: Any, context: Context) -> None:
            reason = f"no method {method!r} on this server, which is gradserve {self._version}"
            await cast("Any", context).abort(grpc.StatusCode.UNIMPLEMENTED, reason)

        return grpc.stream_stream_rpc_method_handler(cast("Any", refuse))


def _method_handler(
    method: MethodDescriptor,
    service: Service,
    traffic: Traffic,
    *,
    asks_clients: bool,
) -> "grpc.RpcMethodHandler[Any, Any]":
    """Returns the handler of a method.

    For gRPC, every request is declared a stream, so that it is read here. The wire format is the same.
    """
    codec = service.codecs.get(method.name, Codec())
    encode = codec.encode or encode_message
    handle = service.handle(method)
    name = method.full_name
    read_request = RequestReader(method.input_type, codec.decoder).read
    is_health = method.full_name == _HEALTH_CHECK
    way = traffic.way

    async def read(context: Context) -> Any:
        data = await traffic.requests.read(context)
        if data is grpc.aio.EOF:
            if method.client_streaming:
                return data
            raise InvalidArgumentError("expected a message, got none")
        way.received += len(data)
        return await read_request(data)

    async def messages(context: Context) -> AsyncIterator[Any]:
        while (message := await read(context)) is not grpc.aio.EOF:
            yield message

    def given_up(context: Context) -> None:
        remaining = time_left(context)
        if remaining is None or remaining > _BY_DEADLINE_SECONDS:
            traffic.calls.give_up(context)

    async def unary(_requests: Any, context: Context) -> bytes:
        way.calls += 1
        peer = certificate_of(context) if asks_clients else None
        call = Call(
            name,
            deadline_of(context),
            peer=peer,
            credentials=partial(credentials_of, context, peer),
            origin=partial(origin_of, context),
        )
        try:
            traffic.calls.begin(context, is_health=is_health)
            request = messages(context) if method.client_streaming else await read(context)
            reply = await _admitted(await handle(request, call), encode, traffic.replies, context)
        except ServiceError as error:
            call.lose()
            await end_with(error, context)
        except asyncio.CancelledError:
            call.lose()
            given_up(context)
            raise
        else:
            way.sent += len(reply)
            return reply
        finally:
            if call.endings:
                when_ended(context, lambda _: call.end())

    async def stream(_requests: Any, context: Context) -> None:
        async def send(response: Any) -> None:
            part = encode(response)
            async with traffic.replies.hold(context, len(part)):
                await write(part, name, context)
            way.sent += len(part)

        way.calls += 1
        try:
            traffic.calls.begin(context, is_health=is_health)
            peer = certificate_of(context) if asks_clients else None
            call = StreamedCall(
                name,
                deadline_of(context),
                peer=peer,
                credentials=partial(credentials_of, context, peer),
                origin=partial(origin_of, context),
                send=send,
            )
            await handle(messages(context) if method.client_streaming else await read(context), call)
        except ServiceError as error:
            await end_with(error, context)
        except asyncio.CancelledError:
            given_up(context)
            raise

    if method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(stream)
    return grpc.stream_unary_rpc_method_handler(unary)


async def _admitted(response: Any, encode: Callable[[Any], bytes], replies: UnreadReplies, context: Context) -> bytes:
    """Returns a reply in bytes, once there is room for it."""
    if isinstance(response, WithContents) and response.contents.num_bytes > SMALL_BYTES:
        await replies.enter(context, response.contents.num_bytes, is_kept=response.contents.is_kept)
        return encode(response)
    reply = encode(response)
    if len(reply) > SMALL_BYTES:
        await replies.enter(context, len(reply), is_kept=False)
    else:
        replies.add_small(context)
    return reply


class Arrivals(grpc.aio.ServerInterceptor):
    """Holds back calls that arrive while the server drains, until clients know that they must connect elsewhere.

    When a server stops, gRPC cancels calls that have arrived but not begun. Their clients read CANCELLED, as if they
    had cancelled the calls themselves. So the server goes on taking calls, but answers them only after it has told
    clients to go elsewhere. A client that waits for an answer sends nothing that could arrive at the wrong moment, and
    then tries again over another connection. Health checks are answered throughout.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._stopping = asyncio.Event()
        self._arrivals: deque[float] = deque(maxlen=_MANY_CALLS)

    async def settle(self, probe: Callable[[], Awaitable[None]]) -> None:
        """Waits until no call has arrived for a moment, but not for long if calls keep coming.

        Args:
            probe: Makes a call and waits for the answer. By then, the server has taken all earlier calls too.
        """
        now = time.monotonic()
        num_recent = sum(now - arrival < 1 for arrival in self._arrivals)
        if num_recent == 0:
            return
        shortest, longest = _QUIET_SECONDS
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_SETTLE_SECONDS):
                await self._quiet(shortest + (longest - shortest) * num_recent / _MANY_CALLS)
        await probe()

    async def _quiet(self, seconds: float) -> None:
        quiet_checks = 0
        # Many short checks, because an event loop that is held up is busy, not quiet.
        while quiet_checks * _CHECK_SECONDS < seconds:
            last_arrival = self._arrivals[-1]
            await asyncio.sleep(_CHECK_SECONDS)
            quiet_checks = quiet_checks + 1 if self._arrivals[-1] == last_arrival else 0

    def refuse(self) -> None:
        """Refuses the calls that are held, and any later call at once."""
        self._stopping.set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """Returns the handler of a new call; while the server drains, waits and returns one that refuses."""
        self._arrivals.append(time.monotonic())
        if self._admission.is_open or handler_call_details.method.startswith(_HEALTH_METHODS):
            return await continuation(handler_call_details)
        await self._stopping.wait()
        # This fits every kind of call: it reads no request, and sends nothing before the status.
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, _requests: Any, context: Context) -> None:
        try:
            self._admission.check()
        except UnavailableError as error:
            await end_with(error, context)


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
        self._endpoint = LastingEndpoint(
            partial(Endpoint, handlers, (self._arrivals,), options, loopbacks, certificates),
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
