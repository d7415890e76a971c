"""Makes gRPC's handlers of a service from its descriptor: the border between gRPC and the chain around every call.

The generated `add_..._to_server` functions fix the serializers. Here the streams get the zero-copy codec, and every
method the same chain.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor

from gradserve.wire.contents import encode_message
from gradserve_server.errors import ServiceError
from gradserve_server.rpc.boundary.call import Call, StreamedCall
from gradserve_server.rpc.boundary.codec import Codec
from gradserve_server.rpc.boundary.credentials import credentials_of
from gradserve_server.rpc.boundary.malformed import tolerant
from gradserve_server.rpc.boundary.service import Service
from gradserve_server.rpc.boundary.status import Context, end_with, write
from gradserve_server.security.peer import PeerCertificate


def no_certificate(_context: Context) -> PeerCertificate | None:
    """Returns None: the server does not ask for certificates."""
    return None


def certificate(context: Context) -> PeerCertificate | None:
    """Returns the checked certificate of the client of a call."""
    return PeerCertificate.of_properties(cast("Any", context).auth_context())


def make_handler(
    service: Service, peer: Callable[[Context], PeerCertificate | None] = no_certificate
) -> grpc.GenericRpcHandler:
    """Returns the handler of all methods of a service.

    Args:
        service: The service.
        peer: Returns the certificate of the client of a call.
    """
    return grpc.method_handlers_generic_handler(
        service.descriptor.full_name,
        {method.name: _method_handler(method, service, peer) for method in service.descriptor.methods},
    )


def _method_handler(
    method: MethodDescriptor, service: Service, peer: Callable[[Context], PeerCertificate | None]
) -> "grpc.RpcMethodHandler[Any, Any]":
    codec = service.codecs.get(method.name, Codec())
    decode = tolerant(codec.decode or message_factory.GetMessageClass(method.input_type).FromString)
    encode = codec.encode or encode_message
    handle = service.handle(method)
    name = method.full_name

    async def unary(request: Any, context: Context) -> Any:
        shown = peer(context)
        call = Call(name, _deadline(context), peer=shown, credentials=partial(credentials_of, context, shown))
        try:
            return await handle(request, call)
        except ServiceError as error:
            await end_with(error, context)
        finally:
            if call.endings:
                # The stubs want an object of a class of their own.
                cast("Any", context).add_done_callback(lambda _: call.end())

    async def stream(request: Any, context: Context) -> None:
        async def send(response: Any) -> None:
            await write(response, name, context)

        try:
            shown = peer(context)
            credentials = partial(credentials_of, context, shown)
            await handle(
                request, StreamedCall(name, _deadline(context), peer=shown, credentials=credentials, send=send)
            )
        except ServiceError as error:
            await end_with(error, context)

    if method.client_streaming and method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(stream, decode, encode)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(stream, decode, encode)
    if method.client_streaming:
        return grpc.stream_unary_rpc_method_handler(unary, decode, encode)
    return grpc.unary_unary_rpc_method_handler(unary, decode, encode)


def _deadline(context: Context) -> float | None:
    # The stubs do not say that a call may have no deadline.
    remaining = cast("float | None", context.time_remaining())
    return None if remaining is None else time.monotonic() + remaining
