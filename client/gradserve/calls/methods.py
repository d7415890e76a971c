"""How each method of the services is called."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf import message_factory

from gradserve.v1 import (
    accumulator_service_pb2,
    batch_norm_layer_service_pb2,
    gradient_ops_service_pb2,
    lease_service_pb2,
    server_service_pb2,
    tensor_messages_pb2,
    tensor_service_pb2,
)
from gradserve.wire.chunks import PartDecoder, encode_part
from gradserve.wire.contents import encode_message

_SERVICES = {
    descriptor.name: descriptor
    for module in (
        accumulator_service_pb2,
        batch_norm_layer_service_pb2,
        gradient_ops_service_pb2,
        lease_service_pb2,
        server_service_pb2,
        tensor_service_pb2,
    )
    for descriptor in module.DESCRIPTOR.services_by_name.values()
}

KEEPALIVE_INTERVAL_MS = 30_000
"""After so long without traffic, a connection with calls that wait asks the server for a sign of life. Servers allow
10 s and more."""

KEEPALIVE_TIMEOUT_MS = 15_000
"""How long it then waits for a sign of life."""

RECONNECT_BACKOFF_MS = (100, 5_000)
"""First and longest pause between attempts to connect. gRPC's own grow to 2 minutes, in which a server that is
back is not noticed."""

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # Where this is longer, a minute unless set, gRPC waits so long in spite of the former.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    # A request that the server has not seen is sent over another connection if it is not longer; inline tensors are
    # up to 3 MiB.
    ("grpc.per_rpc_retry_buffer_size", 4 << 20),
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_BACKOFF_MS[0]),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MS[1]),
    # Two clients of one process have nothing to say to each other.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True)
class Method:
    """Path and serializers of a method."""

    path: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def unary(service: str, method: str) -> Method:
    """Returns how to call a unary method."""
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
