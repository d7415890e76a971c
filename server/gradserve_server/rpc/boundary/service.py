"""A service with the interceptors around its calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from gradserve_server.rpc.boundary.chain import Handle, Interceptor, chained
from gradserve_server.rpc.boundary.codec import Codec


@dataclass(frozen=True)
class Service:
    """A service for a listener to serve.

    Attributes:
        descriptor: The descriptor of the service.
        servicer: An object with an async method for each RPC, which takes the request (or an async iterator of
            requests) and the `Call`, and returns the response (or is an async generator of responses).
        interceptors: The interceptors of every call, outermost first. Only ServiceError may leave them.
        codecs: The codecs of methods that do not use the generated classes.
        keeps_gradients: Whether gradients are kept, and read, after their calls: they may not be in their callers'
            memory then.
    """

    descriptor: ServiceDescriptor
    servicer: object
    interceptors: Sequence[Interceptor]
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    keeps_gradients: bool = False

    def handle(self, method: MethodDescriptor) -> Handle:
        """Returns the handle of one of its methods: the servicer's method, inside the chain."""
        return chained(self.interceptors, method, getattr(self.servicer, method.name))
