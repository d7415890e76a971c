"""Makes gRPC's handlers of a service from its descriptor: the border between gRPC and the chain around every call.

The generated `add_..._to_server` functions fix the serializers. Here the streams get the zero-copy codec, and every
method the same chain.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor

from gradserve.wire.tensors import WithContents, encode_message
from gradserve_server.errors import InvalidArgumentError, ServiceError
from gradserve_server.limits import MAX_NAME_BYTES
from gradserve_server.rpc.boundary.call import Call, StreamedCall
from gradserve_server.rpc.boundary.codec import Codec
from gradserve_server.rpc.boundary.credentials import credentials_of
from gradserve_server.rpc.boundary.long_requests import RequestReader
from gradserve_server.rpc.boundary.origin import origin_of
from gradserve_server.rpc.boundary.service import Service
from gradserve_server.rpc.boundary.status import Context, end_with, write
from gradserve_server.rpc.boundary.traffic import Traffic
from gradserve_server.rpc.boundary.unread import SMALL_BYTES, UnreadReplies
from gradserve_server.security.peer import PeerCertificate

_Read: TypeAlias = Callable[[Context], Awaitable[Any]]

_BY_DEADLINE_SECONDS = 0.1
"""A call that ends so shortly before its deadline has ended because of it: the client's clock is not the server's."""
_HEALTH_CHECK = "grpc.health.v1.Health.Check"


def no_certificate(_context: Context) -> PeerCertificate | None:
    """Returns None: the server does not ask for certificates."""
    return None


def certificate(context: Context) -> PeerCertificate | None:
    """Returns the checked certificate of the client of a call."""
    return PeerCertificate.of_properties(cast("Any", context).auth_context())


def make_handler(
    service: Service, traffic: Traffic, peer: Callable[[Context], PeerCertificate | None] = no_certificate
) -> grpc.GenericRpcHandler:
    """Returns the handler of all methods of a service.

    Args:
        service: The service.
        traffic: The messages of all calls.
        peer: Returns the certificate of the client of a call.
    """
    return grpc.method_handlers_generic_handler(
        service.descriptor.full_name,
        {method.name: _method_handler(method, service, traffic, peer) for method in service.descriptor.methods},
    )


class UnknownMethods(grpc.GenericRpcHandler):
    """Answers calls of methods that no service has, after all other handlers: names the method and the version."""

    def __init__(self, version: str) -> None:
        """Takes the version of the server."""
        self._version = version

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        """Returns a handler that ends a call with UNIMPLEMENTED."""
        method = str(cast("Any", handler_call_details).method)[:MAX_NAME_BYTES].strip("/").replace("/", ".")

        async def refuse(_requests: Any, context: Context) -> None:
            reason = f"no method {method!r} on this server, which is gradserve {self._version}"
            await cast("Any", context).abort(grpc.StatusCode.UNIMPLEMENTED, reason)

        return grpc.stream_stream_rpc_method_handler(cast("Any", refuse))


def _method_handler(
    method: MethodDescriptor, service: Service, traffic: Traffic, peer: Callable[[Context], PeerCertificate | None]
) -> "grpc.RpcMethodHandler[Any, Any]":
    """Returns the handler of a method.

    To gRPC every request is a stream, so that it is read here. On the wire there is no difference.
    """
    codec = service.codecs.get(method.name, Codec())
    encode = codec.encode or encode_message
    handle = service.handle(method)
    name = method.full_name
    receive = _messages if method.client_streaming else _message
    read_request = RequestReader(method.input_type, codec.decoder).read
    is_health = method.full_name == _HEALTH_CHECK
    way = traffic.way

    async def read(context: Context) -> Any:
        data = await traffic.requests.read(context)
        if data is grpc.aio.EOF:
            return data
        way.received += len(data)
        return await read_request(data)

    def given_up(context: Context) -> None:
        remaining = cast("float | None", context.time_remaining())
        if remaining is None or remaining > _BY_DEADLINE_SECONDS:
            traffic.calls.give_up(context)

    async def unary(_requests: Any, context: Context) -> bytes:
        way.calls += 1
        shown = peer(context)
        call = Call(
            name,
            _deadline(context),
            peer=shown,
            credentials=partial(credentials_of, context, shown),
            origin=partial(origin_of, context),
        )
        try:
            traffic.calls.begin(context, is_health=is_health)
            request = await receive(read, context)
            reply = await _admitted(await handle(request, call), encode, traffic.replies, context)
        except ServiceError as error:
            await end_with(error, context)
        except asyncio.CancelledError:
            given_up(context)
            raise
        else:
            way.sent += len(reply)
            return reply
        finally:
            if call.endings:
                # The stubs want an object of a class of their own.
                cast("Any", context).add_done_callback(lambda _: call.end())

    async def stream(_requests: Any, context: Context) -> None:
        async def send(response: Any) -> None:
            part = encode(response)
            async with traffic.replies.hold(context, len(part)):
                await write(part, name, context)
            way.sent += len(part)

        way.calls += 1
        try:
            traffic.calls.begin(context, is_health=is_health)
            shown = peer(context)
            credentials = partial(credentials_of, context, shown)
            call = StreamedCall(
                name,
                _deadline(context),
                peer=shown,
                credentials=credentials,
                origin=partial(origin_of, context),
                send=send,
            )
            await handle(await receive(read, context), call)
        except ServiceError as error:
            await end_with(error, context)
        except asyncio.CancelledError:
            given_up(context)
            raise

    if method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(stream)
    return grpc.stream_unary_rpc_method_handler(unary)


async def _message(read: _Read, context: Context) -> Any:
    """Returns the one message of a request."""
    message = await read(context)
    if message is grpc.aio.EOF:
        raise InvalidArgumentError("expected a message, got none")
    return message


async def _messages(read: _Read, context: Context) -> AsyncIterator[Any]:
    """Returns the messages of a request that is a stream."""

    async def messages() -> AsyncIterator[Any]:
        while (message := await read(context)) is not grpc.aio.EOF:
            yield message

    return messages()


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


def _deadline(context: Context) -> float | None:
    # The stubs do not say that a call may have no deadline.
    remaining = cast("float | None", context.time_remaining())
    return None if remaining is None else time.monotonic() + remaining
