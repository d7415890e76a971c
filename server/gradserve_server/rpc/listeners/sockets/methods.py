"""The methods that can be called on a socket."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import MethodDescriptor

from gradserve_server.rpc.boundary.chain import Handle, Service
from gradserve_server.rpc.boundary.messages import RequestReader

_ON_GRPC_ONLY = frozenset(
    {
        "gradserve.v1.SocketService.IssueTicket",
        "gradserve.v1.LeaseService.HoldClientLease",
    }
)
_ADDING_GRADIENTS = frozenset(
    {
        "gradserve.v1.AccumulatorService.ApplyGradient",
        "gradserve.v1.AccumulatorService.PushPull",
        "gradserve.v1.AccumulatorService.StageGradient",
    }
)
_WAITING_FOR_PAYLOAD = _ADDING_GRADIENTS | {"gradserve.v1.TensorService.StoreTensors"}
_WITH_GPU_MEMORY = frozenset({"gradserve.v1.TensorService.StoreTensors", "gradserve.v1.TensorService.ReadTensors"})
_OPS = "gradserve.v1.GradientOpsService."
_OPS_WITH_LENGTHS = f"{_OPS}CudnnRNN"
"""Ops that check some of their inputs before they use them: lengths, and what their own forward left."""


@dataclass(frozen=True, slots=True)
class Method:
    """A unary method.

    Attributes:
        name: Its full name.
        descriptor: Its descriptor.
        read: Reads a request.
        handle: Answers a call.
        reads_in_place: Whether it can read tensors in memory that the client may change meanwhile.
        begins_early: Whether it can begin when a large payload has not arrived yet.
        reads_gpu_in_place: Whether it can use tensors in memory of the GPU that the client may change meanwhile.
    """

    name: str
    descriptor: MethodDescriptor
    read: Callable[[bytes], Awaitable[Any]]
    handle: Handle
    reads_in_place: bool
    begins_early: bool
    reads_gpu_in_place: bool


def methods_of(services: Sequence[Service]) -> Mapping[bytes, Method]:
    """Returns the methods that can be called on a socket, by name."""
    found = {}
    for service in services:
        for method in service.descriptor.methods:
            if method.client_streaming or method.server_streaming or method.full_name in _ON_GRPC_ONLY:
                continue
            found[method.full_name.encode()] = Method(
                method.full_name,
                method,
                RequestReader(method.input_type).read,
                service.handle(method),
                reads_in_place=method.full_name in _ADDING_GRADIENTS and not service.keeps_gradients,
                begins_early=method.full_name in _WAITING_FOR_PAYLOAD,
                reads_gpu_in_place=_reads_gpu_in_place(method.full_name) and not service.keeps_gradients,
            )
    return found


def _reads_gpu_in_place(name: str) -> bool:
    if name.startswith(_OPS):
        return not name.startswith(_OPS_WITH_LENGTHS)
    return name in _ADDING_GRADIENTS or name in _WITH_GPU_MEMORY
