"""The standard services that tools and load balancers rely on."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import gradserve
from gradserve.transport.status import error_from_status
from gradserve_server.rpc.health.check import check_health
from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.raw_calls import SERVICES

HEALTH = "grpc.health.v1.Health"
SERVICE_NAMES = sorted(service.full_name for service in SERVICES.values())


@pytest.fixture
def channel(server_address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server_address) as channel:
        yield channel


def test_the_services() -> None:
    assert SERVICE_NAMES == [
        "gradserve.v1.AccumulatorService",
        "gradserve.v1.BatchNormLayerService",
        "gradserve.v1.GradientOpsService",
        "gradserve.v1.LeaseService",
        "gradserve.v1.ParameterService",
        "gradserve.v1.ServerService",
        "gradserve.v1.SocketService",
        "gradserve.v1.TensorService",
    ]


def test_reflection_lists_the_services(channel: grpc.Channel) -> None:
    listed = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {*SERVICE_NAMES, HEALTH} <= set(listed)
    assert set(listed) - {*SERVICE_NAMES, HEALTH} == {
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }


def test_the_present_version_of_reflection_answers_as_the_one_before(channel: grpc.Channel) -> None:
    """Tools ask grpc.reflection.v1 first; its messages are those of v1alpha."""
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="gradserve.v1.TensorService")
    answers = []
    for version in ("v1", "v1alpha"):
        ask: Any = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
        answers.append(next(ask(iter([request.SerializeToString()]), timeout=PATIENCE_SECONDS)))
    assert answers[0] == answers[1]
    reply = reflection_pb2.ServerReflectionResponse.FromString(answers[0])
    assert reply.file_descriptor_response.file_descriptor_proto


@pytest.mark.parametrize("path", ["/gradserve.v1.TensorService/NoSuch", "/gradserve.v9.NoService/Call"])
def test_a_method_that_is_not_there_is_named_with_both_versions(channel: grpc.Channel, path: str) -> None:
    call: Any = channel.unary_unary(path)
    with pytest.raises(grpc.RpcError) as raised:
        call(b"", timeout=PATIENCE_SECONDS)
    error: Any = raised.value
    method, version = path.strip("/").replace("/", "."), gradserve.__version__
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert error.details() == f"no method {method!r} on this server, which is gradserve {version}"
    shown = error_from_status(error.code(), error.details(), ())
    assert isinstance(shown, gradserve.UnimplementedError)
    assert shown.message == f"{error.details()}; this client is gradserve {version}"


@pytest.mark.parametrize("service", SERVICE_NAMES)
def test_reflection_describes_the_services(channel: grpc.Channel, service: str) -> None:
    described = DescriptorPool(ProtoReflectionDescriptorDatabase(channel)).FindServiceByName(service)
    expected = SERVICES[service.rpartition(".")[2]]
    for found, method in zip(described.methods, expected.methods, strict=True):
        assert found.name == method.name
        assert (found.client_streaming, found.server_streaming) == (method.client_streaming, method.server_streaming)
        assert [field.name for field in found.input_type.fields] == [field.name for field in method.input_type.fields]
        assert found.output_type.full_name == method.output_type.full_name


@pytest.mark.parametrize("service", ["", *SERVICE_NAMES])
def test_every_service_is_healthy(channel: grpc.Channel, service: str) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_SECONDS)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_SECONDS)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


@pytest.mark.parametrize("service", ["gradserve.v1", "TensorService", "gradserve.v2.TensorService"])
def test_the_health_of_an_unknown_service_is_not_found(channel: grpc.Channel, service: str) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    with pytest.raises(grpc.RpcError) as raised:
        stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_SECONDS)
    error: Any = raised.value
    assert error.code() is grpc.StatusCode.NOT_FOUND


def test_health_check_says_what_a_server_is(server_address: str) -> None:
    assert check_health(server_address, 30) == "SERVING"


def test_health_check_says_why_there_is_no_answer(tmp_path: Any) -> None:
    assert check_health(f"unix:{tmp_path}/nobody", 30).startswith("UNAVAILABLE: ")
