"""Calls as any gRPC client may send them, past everything that gradserve's own client makes right."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from gradserve_protocol.troubleshooting import BY_CODE, DOMAIN
from gradserve_protocol.v1 import (
    accumulator_service_pb2,
    batch_norm_layer_service_pb2,
    gradient_ops_service_pb2,
    lease_service_pb2,
    parameters_service_pb2,
    server_service_pb2,
    socket_service_pb2,
    tensor_service_pb2,
)
from tests.servers.polling import PATIENCE_SECONDS

T = TypeVar("T")

SERVICES = {
    descriptor.name: descriptor
    for module in (
        tensor_service_pb2,
        accumulator_service_pb2,
        batch_norm_layer_service_pb2,
        gradient_ops_service_pb2,
        lease_service_pb2,
        parameters_service_pb2,
        server_service_pb2,
        socket_service_pb2,
    )
    for descriptor in module.DESCRIPTOR.services_by_name.values()
}
METHODS = {method.name: method for service in SERVICES.values() for method in service.methods}


@dataclass(frozen=True)
class Failure:
    """How a call ended that did not succeed.

    Attributes:
        code: Its status.
        message: What was said.
        field: The violated field of the google.rpc.BadRequest, None when there is none.
        retry_after: The seconds of the google.rpc.RetryInfo, None when there is none.
        fine_code: The reason of the google.rpc.ErrorInfo, None when there is none.
    """

    code: grpc.StatusCode
    message: str
    field: str | None
    retry_after: float | None = dataclasses.field(default=None, compare=False)
    fine_code: str | None = dataclasses.field(default=None, compare=False)


def failure_with(code: grpc.StatusCode, status: status_pb2.Status) -> Failure:
    """Reads the details of a status."""
    field = retry_after = fine_code = None
    for detail in status.details:
        violation, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(violation):
            (only,) = violation.field_violations
            assert only.description == status.message
            field = only.field
        elif detail.Unpack(info):
            assert (info.domain, info.reason in BY_CODE) == (DOMAIN, True)
            fine_code = info.reason
        else:
            assert detail.Unpack(retry)
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    return Failure(code, status.message, field, retry_after, fine_code)


def failure_of(error: Any) -> Failure:
    """Reads a grpc.RpcError; the details must agree with the status."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value)
            assert (status.code, status.message) == (error.code().value[0], error.details())
            return failure_with(error.code(), status)
    return Failure(error.code(), error.details(), None)


class RawCalls:
    """Calls methods by name with bytes or messages, and returns bytes or how they failed."""

    def __init__(self, address: str, token: str = "") -> None:
        self._metadata = (("authorization", f"Bearer {token}"),) if token else None
        self.channel = grpc.insecure_channel(
            address, options=[("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        )

    def __enter__(self) -> "RawCalls":
        return self

    def __exit__(self, *exception: object) -> None:
        self.channel.close()

    def start(self, method: str, *requests: Message | bytes, timeout: float | None = PATIENCE_SECONDS) -> Any:
        """Starts a call whose result is a future of bytes (or an iterator of them)."""
        return self.start_stream(method, iter(requests), timeout=timeout)

    def start_stream(
        self, method: str, requests: Iterable[Message | bytes], *, timeout: float | None = PATIENCE_SECONDS
    ) -> Any:
        """As `start`, with any iterable of requests."""
        descriptor = METHODS[method]
        path = f"/{descriptor.containing_service.full_name}/{method}"
        encoded = (each if isinstance(each, bytes) else each.SerializeToString() for each in requests)
        if descriptor.client_streaming:
            upload: grpc.StreamUnaryMultiCallable[bytes, bytes] = self.channel.stream_unary(path)
            return upload.future(encoded, timeout=timeout, metadata=self._metadata)
        (request,) = encoded
        if descriptor.server_streaming:
            download: grpc.UnaryStreamMultiCallable[bytes, bytes] = self.channel.unary_stream(path)
            return download(request, timeout=timeout, metadata=self._metadata)
        unary: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(path)
        return unary.future(request, timeout=timeout, metadata=self._metadata)

    def call(self, method: str, *requests: Message | bytes, timeout: float | None = PATIENCE_SECONDS) -> Any:
        """Returns the response, parsed; for a stream of responses the list of them.

        Raises:
            grpc.RpcError: The call failed.
        """
        descriptor = METHODS[method]
        parse = descriptor.output_type._concrete_class.FromString
        call = self.start(method, *requests, timeout=timeout)
        return [parse(each) for each in call] if descriptor.server_streaming else parse(call.result())

    def fail(self, method: str, *requests: Message | bytes, timeout: float | None = PATIENCE_SECONDS) -> Failure:
        """Makes a call that must fail; returns how it did."""
        try:
            answer = self.call(method, *requests, timeout=timeout)
        except grpc.RpcError as error:
            return failure_of(error)
        raise AssertionError(f"{method} was expected to fail, and answered {answer}")
