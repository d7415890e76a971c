"""Calls as servicers see them, and the chain of interceptors around each method.

Nothing here depends on the transport: gRPC and sockets both make a `Call`, and await the `Handle` of its method.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from gradserve_protocol.tensors import Serializable
from gradserve_server.errors import ServiceError
from gradserve_server.observe.calls import Origin
from gradserve_server.security.identity import ANONYMOUS, Credentials, Identity, PeerCertificate
from gradserve_server.tensors.payload import NO_PAYLOAD, Payload

_REQUEST_ID = "x-request-id"


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Attributes:
        method: The full name of the method, e.g. "gradserve.v1.TensorService.PutTensors".
        deadline: The time at which the client stops waiting, by `time.monotonic`; None for never.
        payload: The tensors beside the message.
        carries_results: Whether results of any size travel with the reply.
        streams_results: Whether the reply may be a `StreamedReply`.
        peer: The client's verified certificate, if the server asks for one.
        endings: Contexts to exit once the reply has left, or can no longer leave.
        undelivered: Functions to call if the reply cannot leave: they delete what only the reply names.
        credentials: Returns the caller's credentials.
        identity: The caller, once the call is admitted.
        origin: Returns where the call came from.
        prepare: Makes the payload ready to be read; None if it is ready.
        may_only_open: The error to raise for takes and for creating something, if the caller may only open what exists.
    """

    method: str
    deadline: float | None = None
    payload: Payload = NO_PAYLOAD
    carries_results: bool = False
    streams_results: bool = False
    peer: PeerCertificate | None = None
    endings: list[AbstractContextManager[object]] = field(default_factory=list)
    undelivered: list[Callable[[], object]] = field(default_factory=list)
    credentials: Callable[[], Credentials] = Credentials
    identity: Identity = ANONYMOUS
    origin: Callable[[], Origin] = Origin
    prepare: Callable[[], Awaitable[None]] | None = None
    may_only_open: ServiceError | None = None

    def time_left(self) -> float | None:
        """Returns the seconds until the client stops waiting, None for no limit."""
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)

    def end(self, error: ServiceError | None = None) -> None:
        """Exits the registered contexts in reverse order, passing the error if the call failed."""
        while self.endings:
            self.endings.pop().__exit__(None if error is None else type(error), error, None)

    def lose(self) -> None:
        """Notes that the reply cannot leave, as the client has given up the call or the connection has ended."""
        while self.undelivered:
            self.undelivered.pop()()


@dataclass(frozen=True, slots=True)
class StreamedCall(Call):
    """A call whose answer is a stream.

    Attributes:
        send: Sends a response, and returns when there is room for the next one.
    """

    send: Callable[[Any], Awaitable[None]] = field(kw_only=True)


@dataclass(frozen=True)
class StreamedReply:
    """A reply whose payload is still being made while it is sent, to a call with `streams_results`.

    Attributes:
        message: The message.
        num_bytes: The length of the payload.
        pieces: The payload; each piece is valid until the next is requested. One of the call's endings closes it.
    """

    message: Serializable
    num_bytes: int
    pieces: AsyncIterator[memoryview]


def origin(peer: str, metadata: Mapping[str, str]) -> Origin:
    """Returns the origin of a call with this metadata."""
    return Origin(peer, metadata.get(_REQUEST_ID, ""), metadata)


Handle: TypeAlias = Callable[[Any, Any], Awaitable[Any]]
"""Answers a call: takes the request (or an async iterator of requests) and the `Call`, and returns the response. For a
`StreamedCall` it sends the responses, and returns when all are sent."""


class Interceptor(Protocol):
    """Acts before or after calls."""

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """Returns a handle that acts around another one. Called once per method, before it is served.

        A handle that only inspects a call before passing it on need not be a coroutine: it raises, or returns what
        `handle` returns.
        """
        ...


@dataclass(frozen=True)
class Codec:
    """Serializers of one method's requests and responses; None for those of the generated classes.

    Attributes:
        decoder: Turns a parser of requests into one that returns what the servicer takes.
        encode: Serializes a response.
    """

    decoder: Callable[[Callable[[bytes], Any]], Callable[[bytes], Any]] | None = None
    encode: Callable[[Any], bytes] | None = None


@dataclass(frozen=True)
class Service:
    """A service, with the interceptors around its calls.

    Attributes:
        descriptor: The descriptor of the service.
        servicer: An object with an async method for each RPC, which takes the request (or an async iterator of
            requests) and the `Call`, and returns the response (or is an async generator of responses).
        interceptors: The interceptors of every call, outermost first. They let no error escape but ServiceError.
        codecs: The codecs of methods that do not use the generated classes.
        keeps_gradients: Whether gradients and updates are kept and read after their calls, so that they must not stay
            in the callers' memory.
    """

    descriptor: ServiceDescriptor
    servicer: object
    interceptors: Sequence[Interceptor]
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    keeps_gradients: bool = False

    def handle(self, method: MethodDescriptor) -> Handle:
        """Returns the handle of one of its methods: the servicer's method, inside the chain."""
        return chained(self.interceptors, method, getattr(self.servicer, method.name))


def chained(interceptors: Sequence[Interceptor], method: MethodDescriptor, answer: Callable[..., Any]) -> Handle:
    """Returns the handle of a method's calls.

    Args:
        interceptors: The interceptors, outermost first.
        method: The descriptor of the method.
        answer: The servicer's method: takes the request (or an async iterator of requests) and the `Call`, and
            returns the response, or is an async generator of responses.
    """
    handle = _sending(answer) if method.server_streaming else answer
    for interceptor in reversed(interceptors):
        handle = interceptor.around(method, handle)
    return handle


def _sending(answer: Callable[[Any, Call], Any]) -> Handle:
    async def handle(request: Any, call: StreamedCall) -> None:
        async with aclosing(answer(request, call)) as responses:
            async for response in responses:
                await call.send(response)

    return handle
