"""gRPC channels to a server, blocking or with asyncio, and their calls."""

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from gradserve.address import Address
from gradserve.errors import CallCancelledError, GradserveError, UnavailableError
from gradserve.tls import CertificateFiles, Certificates
from gradserve.transport import methods
from gradserve.transport.route import Route, is_loopback
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.shown import Shown
from gradserve.transport.status import error_from_status, explain, may_pass
from gradserve.wire.frames import Metadata

_log = logging.getLogger("gradserve")


class ChannelMaker(Protocol):
    """Opens channels: `grpc` or `grpc.aio`."""

    def insecure_channel(self, target: str, options: Any = None) -> Any:
        """Returns a channel that is not encrypted."""
        ...

    def secure_channel(self, target: str, credentials: grpc.ChannelCredentials, options: Any = None) -> Any:
        """Returns an encrypted channel."""
        ...


class OpenChannel:
    """A channel that gRPC has opened. Its functions are gRPC's, and return what the kind of channel returns.

    Attributes:
        close: Closes it.
        put: Makes a PutTensors call.
        get: Makes a GetTensors call.
        unary: Returns the function that makes a unary call, by the names of service and method.
    """

    def __init__(self, channel: Any, shown: Shown) -> None:
        put, get, show = methods.PUT_TENSORS, methods.GET_TENSORS, functools.partial(_showing, shown)
        self.close: Callable[[], Any] = channel.close
        self.put: Any = show(channel.stream_unary(put.path, put.encode, put.decode))
        self.get: Any = show(channel.unary_stream(get.path, get.encode, get.decode))
        self.unary = functools.cache(functools.partial(_make_unary, channel, show))


class Channel(Protocol):
    """The gRPC channel to a server.

    Attributes:
        route: The route to the server.
    """

    route: Route

    @property
    def now(self) -> OpenChannel:
        """What the next call takes."""
        ...

    @property
    def opened(self) -> list[OpenChannel]:
        """What calls may be on, the latest last."""
        ...

    def failure(self, error: Any, *, is_closed: bool) -> GradserveError:
        """Returns the exception for a failed call; `is_closed` says that the client closed the channel."""
        ...


def make_channel(address: Address, settings: ConnectionSettings, shown: Shown, maker: ChannelMaker) -> Channel:
    """Returns a channel to a server; TCP is encrypted if the settings have certificates."""
    if address.path or settings.certificates is None:
        return PlainChannel(address, settings, shown, maker)
    return EncryptedChannel(address, settings, settings.certificates, shown, maker)


class PlainChannel:
    """A `Channel` that is not encrypted."""

    def __init__(self, address: Address, settings: ConnectionSettings, shown: Shown, maker: ChannelMaker) -> None:
        self.route = Route.to(address)
        options = (*channel_options(settings), *self.route.options)
        self.now = OpenChannel(maker.insecure_channel(address.target, options=options), shown)
        self.opened = [self.now]
        if settings.token is not None and address.host and not is_loopback(address.host):
            _log.warning("the token for %s travels unencrypted: whoever listens on the way can use it", address)

    def failure(self, error: Any, *, is_closed: bool) -> GradserveError:
        """See `Channel`."""
        return _failure(error, self.route, is_closed=is_closed, is_encrypted=False)


class EncryptedChannel:
    """An encrypted `Channel`. Once the certificates have changed, new calls take another connection.

    Calls under way stay on the connection that they have. gRPC ends it by itself after half an hour without calls.
    """

    def __init__(
        self,
        address: Address,
        settings: ConnectionSettings,
        files: CertificateFiles,
        shown: Shown,
        maker: ChannelMaker,
    ) -> None:
        self.route = Route.to(address)
        self._files = files
        self._certificates = files.current()
        self._open = functools.partial(_open_encrypted, address, settings, self.route, shown, maker)
        self.opened = [self._open(self._certificates)]
        self._lock = threading.Lock()

    @property
    def now(self) -> OpenChannel:
        """See `Channel`."""
        current = self._files.current()
        if current is not self._certificates:
            with self._lock:
                if current is not self._certificates:
                    self.opened.append(self._open(current))
                    self._certificates = current
        return self.opened[-1]

    def failure(self, error: Any, *, is_closed: bool) -> GradserveError:
        """See `Channel`."""
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            self._files.look_again()
        return _failure(error, self.route, is_closed=is_closed, is_encrypted=True)


def _open_encrypted(
    address: Address,
    settings: ConnectionSettings,
    route: Route,
    shown: Shown,
    maker: ChannelMaker,
    certificates: Certificates,
) -> OpenChannel:
    credentials = channel_credentials(certificates)
    options = (*channel_options(settings), *route.options)
    return OpenChannel(maker.secure_channel(address.target, credentials, options=options), shown)


def channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    """Returns certificates as gRPC takes them."""
    return grpc.ssl_channel_credentials(certificates.ca, certificates.key, certificates.certificate)


def _failure(error: Any, route: Route, *, is_closed: bool, is_encrypted: bool) -> GradserveError:
    if is_closed and error.code() is grpc.StatusCode.CANCELLED:
        return closed()
    message = explain(error.code(), error.details(), route, is_encrypted=is_encrypted)
    failure = error_from_status(error.code(), message, error.trailing_metadata())
    if isinstance(failure, UnavailableError):
        failure.may_pass = may_pass(error.details())
    return failure


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


def _make_unary(channel: Any, show: Callable[[Any], Any], service: str, method: str) -> Any:
    found = methods.unary_method(service, method)
    return show(channel.unary_unary(found.path, found.encode, found.decode))


class _Showing:
    """A function of a channel that makes calls, each of which shows who makes it."""

    def __init__(self, call: Any, shown: Shown) -> None:
        self._call = call
        self._shown = shown

    def __call__(self, request: Any, *, timeout: float | None, metadata: Metadata = ()) -> Any:
        return self._call(request, timeout=timeout, metadata=(*self._shown.metadata, *metadata))

    def future(self, request: Any, *, timeout: float | None, metadata: Metadata = ()) -> Any:
        return self._call.future(request, timeout=timeout, metadata=(*self._shown.metadata, *metadata))


def _showing(shown: Shown, call: Any) -> Any:
    return _Showing(call, shown) if shown.is_something else call


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
