"""The wire format of the naive service: three methods, with protobuf's own wrapper messages.

`BytesValue` is a message with one `bytes` field, so no code needs to be generated for it.
"""

from __future__ import annotations

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.wrappers_pb2 import BytesValue, Int64Value

SERVICE = "naive.Accumulator"
OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]


class Stub:
    """The stub that protoc would generate for a client."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.Apply = channel.unary_unary(
            f"/{SERVICE}/Apply",
            request_serializer=BytesValue.SerializeToString,
            response_deserializer=Empty.FromString,
        )
        self.Take = channel.unary_unary(
            f"/{SERVICE}/Take",
            request_serializer=Int64Value.SerializeToString,
            response_deserializer=BytesValue.FromString,
        )
