"""gRPC channels to a server, blocking or with asyncio, and their calls."""

import functools
from collections.abc import Callable
from typing import Any

import grpc

from gradserve.address import Address
from gradserve.errors import CallCancelledError, GradserveError
from gradserve.transport import methods
from gradserve.transport.route import Route
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.status import error_from_status, explain


class Channel:
    """A gRPC channel to a server. Its functions are gRPC's, and return what the kind of channel returns.

    Attributes:
        route: The route to the server.
        close: Closes it.
        put: Makes a PutTensors call.
        get: Makes a GetTensors call.
        unary: Returns the function that makes a unary call, by the names of service and method.
    """

    def __init__(self, address: Address, settings: ConnectionSettings, open_channel: Callable[..., Any]) -> None:
        """Takes the server's address, and the function that opens a channel, from `grpc` or `grpc.aio`."""
        self.route = Route.to(address)
        channel = open_channel(address.target, options=(*channel_options(settings), *self.route.options))
        put, get = methods.PUT_TENSORS, methods.GET_TENSORS
        self.close: Callable[[], Any] = channel.close
        self.put: Any = channel.stream_unary(put.path, put.encode, put.decode)
        self.get: Any = channel.unary_stream(get.path, get.encode, get.decode)
        self.unary = functools.cache(functools.partial(_make_unary, channel))

    def failure(self, error: Any, *, is_closed: bool) -> GradserveError:
        """Returns the exception for a failed call; `is_closed` says that the client closed the channel."""
        if is_closed and error.code() is grpc.StatusCode.CANCELLED:
            return closed()
        message = explain(error.code(), error.details(), self.route)
        return error_from_status(error.code(), message, error.trailing_metadata())


def channel_options(settings: ConnectionSettings) -> tuple[tuple[str, int], ...]:
    """Returns the settings as arguments of a gRPC channel."""
    longest = -1 if settings.sizes.longest is None else settings.sizes.longest
    return (
        ("grpc.max_receive_message_length", longest),
        ("grpc.max_send_message_length", longest),
        ("grpc.keepalive_time_ms", _milliseconds(settings.keepalive.interval)),
        ("grpc.keepalive_timeout_ms", _milliseconds(settings.keepalive.timeout)),
        # gRPC waits as long as this, a minute by default, if it is longer than the keepalive timeout.
        ("grpc.http2.ping_timeout_ms", _milliseconds(settings.keepalive.timeout)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.per_rpc_retry_buffer_size", settings.sizes.kept),
        ("grpc.initial_reconnect_backoff_ms", _milliseconds(settings.reconnecting.first_pause)),
        ("grpc.max_reconnect_backoff_ms", _milliseconds(settings.reconnecting.longest_pause)),
        ("grpc.min_reconnect_backoff_ms", _milliseconds(settings.reconnecting.attempt)),
        # Two clients in one process share no connections.
        ("grpc.use_local_subchannel_pool", 1),
    )


def closed() -> GradserveError:
    """Returns the error for a call on a closed channel."""
    return CallCancelledError("the client is closed")


def _make_unary(channel: Any, service: str, method: str) -> Any:
    found = methods.unary_method(service, method)
    return channel.unary_unary(found.path, found.encode, found.decode)


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
