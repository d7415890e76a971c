"""A generic tool, such as grpcurl, needs no protos: what the server says of itself is enough for a whole round."""

import uuid
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.servers.polling import PATIENCE_SECONDS


def call(channel: grpc.Channel, service: ServiceDescriptor, method: str, request: dict[str, Any]) -> dict[str, Any]:
    """Makes a call of JSON, as such tools do."""
    found = service.methods_by_name[method]
    reply_class = GetMessageClass(found.output_type)
    make: Any = channel.unary_unary(
        f"/{service.full_name}/{method}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=reply_class.FromString,
    )
    reply = make(ParseDict(request, GetMessageClass(found.input_type)()), timeout=PATIENCE_SECONDS)
    return MessageToDict(reply)


def test_a_round(server_address: str) -> None:
    accumulator = {"name": uuid.uuid4().hex}
    with grpc.insecure_channel(server_address) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        service = pool.FindServiceByName("gradserve.v1.AccumulatorService")
        components = [{"dtype": "DATA_TYPE_FLOAT32", "shape": {"dims": [1]}}]
        call(channel, service, "CreateAccumulator", {"accumulator": accumulator, "spec": {"components": components}})
        for one_or_three in ("AACAPw==", "AABAQA=="):  # as JSON has bytes
            dense = {"dtype": "DATA_TYPE_FLOAT32", "shape": [1], "content": one_or_three}
            reply = call(
                channel, service, "ApplyGradient", {"accumulator": accumulator, "gradient": [{"dense": dense}]}
            )
            assert reply["outcome"] == "APPLY_OUTCOME_ACCEPTED"
        reply = call(channel, service, "TakeGradient", {"accumulator": accumulator, "numRequired": 2})
        assert reply["average"]["components"][0]["dense"]["content"] == "AAAAQA=="  # two
        assert reply["average"]["step"] == "1"
        call(channel, service, "DeleteAccumulator", {"accumulator": accumulator})
