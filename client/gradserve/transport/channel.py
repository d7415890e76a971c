"""gRPC channels to a server, blocking or for asyncio, and the calls that they make."""

import functools
from collections.abc import Callable
from typing import Any

import grpc

from gradserve.address import Address
from gradserve.errors import CallCancelledError, GradserveError
from gradserve.transport import methods
from gradserve.transport.route import Route
from gradserve.transport.status import error_from_status, explain

KEEPALIVE_INTERVAL_MS = 30_000
"""After so long without traffic, a connection with calls that wait asks the server for a sign of life. Servers allow
10 s and more."""

KEEPALIVE_TIMEOUT_MS = 15_000
"""How long it then waits for a sign of life."""

RECONNECT_BACKOFF_MS = (100, 5_000)
"""First and longest pause between attempts to connect. gRPC's own grow to 2 minutes, in which a server that is
back is not noticed."""

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # Where this is longer, a minute unless set, gRPC waits so long in spite of the former.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    # A request that the server has not seen is sent over another connection if it is not longer; inline tensors are
    # up to 3 MiB.
    ("grpc.per_rpc_retry_buffer_size", 4 << 20),
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_BACKOFF_MS[0]),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MS[1]),
    # Two clients of one process have nothing to say to each other.
    ("grpc.use_local_subchannel_pool", 1),
)


class Channel:
    """A gRPC channel to a server. Its callables are those of gRPC: they return what the kind of the channel does.

    Attributes:
        close: Closes it.
        put: Makes a PutTensors call.
        get: Makes a GetTensors call.
        unary: Returns what makes a unary call, by the names of service and method.
    """

    def __init__(self, address: Address, open_channel: Callable[..., Any]) -> None:
        """Takes where the server is, and what opens a channel: of `grpc`, or of `grpc.aio`."""
        self._route = Route.to(address)
        channel = open_channel(address.target, options=(*CHANNEL_OPTIONS, *self._route.options))
        put, get = methods.PUT_TENSORS, methods.GET_TENSORS
        self.close: Callable[[], Any] = channel.close
        self.put: Callable[..., Any] = channel.stream_unary(put.path, put.encode, put.decode)
        self.get: Callable[..., Any] = channel.unary_stream(get.path, get.encode, get.decode)
        self.unary = functools.cache(functools.partial(_make_unary, channel))

    def failure(self, error: Any, *, is_closed: bool) -> GradserveError:
        """Returns the exception of a call that failed; `is_closed` says that the client closed the channel."""
        if is_closed and error.code() is grpc.StatusCode.CANCELLED:
            return closed()
        message = explain(error.code(), error.details(), self._route)
        return error_from_status(error.code(), message, error.trailing_metadata())


def closed() -> GradserveError:
    """Returns the error of a call on a closed channel."""
    return CallCancelledError("the client is closed")


def _make_unary(channel: Any, service: str, method: str) -> Any:
    found = methods.unary(service, method)
    return channel.unary_unary(found.path, found.encode, found.decode)
