"""The chain of interceptors around every call, built once for each method."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeAlias

from google.protobuf.descriptor import MethodDescriptor

from gradserve_server.rpc.boundary.call import Call, StreamedCall

Handle: TypeAlias = Callable[[Any, Any], Awaitable[Any]]
"""Answers a call: takes the request (or an async iterator of requests) and the `Call`, and returns the response. For a
`StreamedCall` it sends the responses, and returns when all are sent."""


class Interceptor(Protocol):
    """Acts before or after calls."""

    def around(self, method: MethodDescriptor, handle: Handle) -> Handle:
        """Returns a handle that acts around another one. Called once for each method, before it is served.

        A handle that only looks at a call before passing it on need not be a coroutine: it raises, or returns what
        `handle` returns.
        """
        ...


def chained(interceptors: Sequence[Interceptor], method: MethodDescriptor, answer: Callable[..., Any]) -> Handle:
    """Returns the handle of a method's calls.

    Args:
        interceptors: The interceptors, outermost first.
        method: Its descriptor.
        answer: The method of the servicer: takes the request (or an async iterator of requests) and the `Call`, and
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
