"""Paths and serializers of the services' methods."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from google.protobuf import message_factory

from gradserve.v1 import (
    accumulator_service_pb2,
    batch_norm_layer_service_pb2,
    gradient_ops_service_pb2,
    lease_service_pb2,
    server_service_pb2,
    socket_service_pb2,
    tensor_messages_pb2,
    tensor_service_pb2,
)
from gradserve.wire.tensors import PartDecoder, encode_message, encode_part

_SERVICES = {
    descriptor.name: descriptor
    for module in (
        accumulator_service_pb2,
        batch_norm_layer_service_pb2,
        gradient_ops_service_pb2,
        lease_service_pb2,
        server_service_pb2,
        socket_service_pb2,
        tensor_service_pb2,
    )
    for descriptor in module.DESCRIPTOR.services_by_name.values()
}


@dataclass(frozen=True)
class Method:
    """The path and the serializers of a method.

    Attributes:
        path: The path over gRPC.
        encode: Serializes a request.
        decode: Parses a response.
    """

    path: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]

    @cached_property
    def frame_name(self) -> bytes:
        """The name in a frame on a socket."""
        return self.path[1:].replace("/", ".").encode()


@cache
def unary_method(service: str, method: str) -> Method:
    """Returns the path and the serializers of a unary method."""
    descriptor = _SERVICES[service]
    found = descriptor.methods_by_name[method]
    return Method(
        f"/{descriptor.full_name}/{method}",
        encode_message,
        message_factory.GetMessageClass(found.output_type).FromString,
    )


PUT_TENSORS = Method(
    f"/{_SERVICES['TensorService'].full_name}/PutTensors",
    encode_part,
    tensor_messages_pb2.PutTensorsResponse.FromString,
)
GET_TENSORS = Method(
    f"/{_SERVICES['TensorService'].full_name}/GetTensors",
    tensor_messages_pb2.GetTensorsRequest.SerializeToString,
    PartDecoder(tensor_messages_pb2.GetTensorsResponse.FromString),
)
