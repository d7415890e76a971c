"""The methods that can be called on a socket."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import message_factory

from gradserve_server.rpc.boundary.chain import Handle
from gradserve_server.rpc.boundary.density import PartCounter
from gradserve_server.rpc.boundary.malformed import tolerant
from gradserve_server.rpc.boundary.service import Service

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
    }
)


@dataclass(frozen=True, slots=True)
class Method:
    """A unary method.

    Attributes:
        name: Its full name.
        parts: Counts the parts of a request.
        decode: Reads a request.
        handle: Answers a call.
        reads_in_place: Whether it can read tensors in memory that the client may change meanwhile.
        begins_early: Whether it can begin when a large payload has not arrived yet.
    """

    name: str
    parts: PartCounter
    decode: Callable[[bytes], Any]
    handle: Handle
    reads_in_place: bool
    begins_early: bool


def methods_of(services: Sequence[Service]) -> Mapping[bytes, Method]:
    """Returns the methods that can be called on a socket, by name."""
    found = {}
    for service in services:
        for method in service.descriptor.methods:
            if method.client_streaming or method.server_streaming or method.full_name in _ON_GRPC_ONLY:
                continue
            found[method.full_name.encode()] = Method(
                method.full_name,
                PartCounter(method.input_type),
                tolerant(message_factory.GetMessageClass(method.input_type).FromString),
                service.handle(method),
                reads_in_place=method.full_name in _ADDING_GRADIENTS,
                begins_early=method.full_name in _ADDING_GRADIENTS,
            )
    return found
