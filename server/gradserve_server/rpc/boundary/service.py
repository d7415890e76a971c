"""A service, and what happens around its calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from gradserve_server.rpc.boundary.chain import Handle, Interceptor, chained
from gradserve_server.rpc.boundary.codec import Codec


@dataclass(frozen=True)
class Service:
    """What is served.

    Attributes:
        descriptor: The service's.
        servicer: Has an async method of the name of each RPC, which takes the request (or an async iterator of
            requests) and the `Call`, and returns the response (or is an async generator of responses).
        interceptors: What happens around every call, outermost first. Nothing but ServiceError may leave them.
        codecs: For methods that do not use the generated classes.
    """

    descriptor: ServiceDescriptor
    servicer: object
    interceptors: Sequence[Interceptor]
    codecs: Mapping[str, Codec] = field(default_factory=dict)

    def handle(self, method: MethodDescriptor) -> Handle:
        """Returns what answers the calls of one of its methods: the servicer's, in the chain."""
        return chained(self.interceptors, method, getattr(self.servicer, method.name))
