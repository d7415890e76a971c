"""Method handlers of a servicer, made from the service's descriptor.

The generated `add_..._to_server` functions fix the serializers; here the streams get the zero-copy codec, and
every method the same boundary: malformed messages, draining and domain errors are dealt with once.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError

from gradserve.wire.contents import encode_message
from gradserve_server.errors import InvalidArgumentError
from gradserve_server.rpc.boundary.admission import Admission
from gradserve_server.rpc.boundary.status import Context, status_boundary

Decode = Callable[[bytes], Any]
Encode = Callable[[Any], bytes]


@dataclass(frozen=True)
class Codec:
    """How to read requests and write responses of one method; None for the generated classes."""

    decode: Decode | None = None
    encode: Encode | None = None


@dataclass(frozen=True)
class _Malformed:
    reason: str


def make_handler(
    service: ServiceDescriptor, servicer: object, admission: Admission, codecs: Mapping[str, Codec] | None = None
) -> grpc.GenericRpcHandler:
    """Returns the handler of all methods of a service.

    Args:
        service: Its descriptor.
        servicer: Has an async method of the name of each RPC, which takes the request (or an async iterator of
            requests) and the context, and returns the response (or is an async generator of responses).
        admission: Refuses calls while the server drains.
        codecs: For methods that do not use the generated classes.
    """
    return grpc.method_handlers_generic_handler(
        service.full_name,
        {
            method.name: _method_handler(
                method, getattr(servicer, method.name), admission, (codecs or {}).get(method.name, Codec())
            )
            for method in service.methods
        },
    )


def _method_handler(
    method: MethodDescriptor, call: Callable[..., Any], admission: Admission, codec: Codec
) -> "grpc.RpcMethodHandler[Any, Any]":
    decode = _tolerant(codec.decode or message_factory.GetMessageClass(method.input_type).FromString)
    encode = codec.encode or encode_message
    name = method.full_name

    def checked(request: Any) -> Any:
        admission.check()
        return _sound_all(request) if method.client_streaming else _sound(request)

    async def unary(request: Any, context: Context) -> Any:
        async with status_boundary(name, context):
            return await call(checked(request), context)

    async def stream(request: Any, context: Context) -> None:
        async with status_boundary(name, context), aclosing(call(checked(request), context)) as responses:
            async for response in responses:
                await context.write(response)

    if method.client_streaming and method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(stream, decode, encode)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(stream, decode, encode)
    if method.client_streaming:
        return grpc.stream_unary_rpc_method_handler(unary, decode, encode)
    return grpc.unary_unary_rpc_method_handler(unary, decode, encode)


def _tolerant(decode: Decode) -> Decode:
    """Makes a malformed message a value: raised here, an error would reach the client as UNKNOWN."""

    def tolerant(message: bytes) -> Any:
        try:
            return decode(message)
        except DecodeError as error:
            return _Malformed(str(error))

    return tolerant


def _sound(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise InvalidArgumentError(f"the message is not valid protobuf of the expected type: {request.reason}")
    return request


async def _sound_all(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _sound(request)
