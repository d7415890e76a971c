"""gRPC channels to a server, blocking or with asyncio: methods, credentials, options, and streams of tensors."""

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol, Self

import grpc
import numpy as np
from google.protobuf import message_factory

from gradserve.calls.exchange import Progress, Upload
from gradserve.errors import CallCancelledError, GradserveError, InternalError, UnavailableError
from gradserve.transport.in_process import InProcessChannels
from gradserve.transport.route import Route, is_loopback
from gradserve.transport.settings import ConnectionSettings
from gradserve.transport.status import error_from_status, explain, may_pass
from gradserve_protocol.address import Address
from gradserve_protocol.arrays import Array, Assembly, PayloadError, buffer_of
from gradserve_protocol.frames import Metadata
from gradserve_protocol.tensors import Chunk, PartDecoder, cut, encode_message, encode_part, to_dtype
from gradserve_protocol.tls import Certificates
from gradserve_protocol.v1 import (
    accumulator_service_pb2,
    batch_norm_layer_service_pb2,
    gradient_ops_service_pb2,
    lease_service_pb2,
    parameters_service_pb2,
    server_service_pb2,
    socket_service_pb2,
    tensor_messages_pb2,
    tensor_service_pb2,
)

_log = logging.getLogger("gradserve")
_AUTHORIZATION = "authorization"
MAX_WAITING_CALLS = 100
"""The most waiting calls on one connection. HTTP/2 recommends that servers take at least as many streams; those of
gradserve take 256 (max_connection_calls)."""
_SERVICES = {
    descriptor.name: descriptor
    for module in (
        accumulator_service_pb2,
        batch_norm_layer_service_pb2,
        gradient_ops_service_pb2,
        lease_service_pb2,
        parameters_service_pb2,
        server_service_pb2,
        socket_service_pb2,
        tensor_service_pb2,
    )
    for descriptor in module.DESCRIPTOR.services_by_name.values()
}


@dataclass(frozen=True)
class Method:
    """The path and the serializers of a method.

    Attributes:
        path: The path over gRPC.
        encode: Serializes a request.
        decode: Parses a response.
    """

    path: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]

    @cached_property
    def frame_name(self) -> bytes:
        """The name in a frame on a socket."""
        return self.path[1:].replace("/", ".").encode()


@cache
def unary_method(service: str, method: str) -> Method:
    """Returns the path and the serializers of a unary method."""
    descriptor = _SERVICES[service]
    found = descriptor.methods_by_name[method]
    return Method(
        f"/{descriptor.full_name}/{method}",
        encode_message,
        message_factory.GetMessageClass(found.output_type).FromString,
    )


PUT_TENSORS = Method(
    f"/{_SERVICES['TensorService'].full_name}/PutTensors",
    encode_part,
    tensor_messages_pb2.PutTensorsResponse.FromString,
)
GET_TENSORS = Method(
    f"/{_SERVICES['TensorService'].full_name}/GetTensors",
    tensor_messages_pb2.GetTensorsRequest.SerializeToString,
    PartDecoder(tensor_messages_pb2.GetTensorsResponse.FromString),
)


class CallCredentials:
    """The token of a client, or the key of its user: a server's Unix socket for shared memory has keys for its users.

    Safe to use from several threads.

    Attributes:
        metadata: The metadata of calls.
        takes_key: Whether calls may show the key of the user.
    """

    def __init__(self, metadata: tuple[tuple[str, str], ...] = (), *, takes_key: bool = False) -> None:
        self.metadata = metadata
        self.takes_key = takes_key

    @classmethod
    def to(cls, address: Address, settings: ConnectionSettings) -> Self:
        """Returns what calls to a server show."""
        if settings.token is not None:
            return cls(settings.token.metadata)
        return cls(takes_key=bool(address.path))

    @property
    def is_something(self) -> bool:
        """True if calls show anything, now or later."""
        return self.takes_key or bool(self.metadata)

    def show_user(self, key: str) -> None:
        """Shows a key of the user from now on."""
        self.metadata = ((_AUTHORIZATION, f"Gradserve-User {key}"),)


class ChannelMaker(Protocol):
    """Opens channels: `grpc`, `grpc.aio`, or `InProcessChannels`."""

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
        num_waiting: The calls on it that wait for other clients.
    """

    def __init__(self, channel: Any, shown: CallCredentials) -> None:
        put, get, show = PUT_TENSORS, GET_TENSORS, functools.partial(_showing, shown)
        self.close: Callable[[], Any] = channel.close
        self.put: Any = show(channel.stream_unary(put.path, put.encode, put.decode))
        self.get: Any = show(channel.unary_stream(get.path, get.encode, get.decode))
        self.unary = functools.cache(functools.partial(_make_unary, channel, show))
        self.num_waiting = 0


class Channel:
    """The gRPC channels to a server; over TCP they are encrypted if the settings have certificates.

    There is one, and further ones where more calls wait for other clients than one connection should carry. So calls
    that do not wait, and may end the waits of others, are never behind them. Once the certificates have changed, new
    calls take a new connection; calls under way stay on theirs. gRPC ends a connection by itself after half an hour
    without calls.

    Attributes:
        route: The route to the server.
        opened: The channels that calls may be on, the latest last.
    """

    def __init__(
        self, address: Address, settings: ConnectionSettings, shown: CallCredentials, maker: ChannelMaker
    ) -> None:
        self.route = Route.to(address)
        self._address = address
        self._options = (*channel_options(settings), *self.route.options)
        self._shown = shown
        self._maker = InProcessChannels(is_async=maker is grpc.aio) if address.name else maker
        self._lock = threading.Lock()
        self._files = settings.certificates if address.host else None
        self._certificates = None if self._files is None else self._files.current()
        self._current = [self._open(self._certificates)]
        self.opened = list(self._current)
        if self._files is None and settings.token is not None and address.host and not is_loopback(address.host):
            _log.warning("the token for %s travels unencrypted: anyone who listens on the way can use it", address)

    @property
    def now(self) -> OpenChannel:
        """The channel for the next call that does not wait."""
        if self._files is not None and (current := self._files.current()) is not self._certificates:
            with self._lock:
                if current is not self._certificates:
                    self._current = [self._open(current)]
                    self.opened += self._current
                    self._certificates = current
        return self._current[0]

    @contextmanager
    def waiting(self) -> Iterator[OpenChannel]:
        """Returns the channel for a call that waits for other clients, which is made in the block."""
        _ = self.now  # with the certificates of now
        with self._lock:
            channel = next((each for each in self._current if each.num_waiting < MAX_WAITING_CALLS), None)
            if channel is None:
                channel = self._open(self._certificates)
                self._current.append(channel)
                self.opened.append(channel)
            channel.num_waiting += 1
        try:
            yield channel
        finally:
            with self._lock:
                channel.num_waiting -= 1

    def failure(self, error: Any, *, is_closed: bool) -> GradserveError:
        """Returns the exception for a failed call; `is_closed` says that the client closed the channel."""
        if self._files is not None and error.code() is grpc.StatusCode.UNAVAILABLE:
            self._files.look_again()
        if is_closed and error.code() is grpc.StatusCode.CANCELLED:
            return closed()
        message, code = explain(error.code(), error.details(), self.route, is_encrypted=self._files is not None)
        failure = error_from_status(error.code(), message, error.trailing_metadata())
        if isinstance(failure, UnavailableError):
            failure.may_pass = may_pass(error.details())
            failure.was_sent = code is None
            failure.code = code or failure.code
        return failure

    def _open(self, certificates: Certificates | None) -> OpenChannel:
        target, options = self._address.target, self._options
        if certificates is None:
            return OpenChannel(self._maker.insecure_channel(target, options=options), self._shown)
        credentials = channel_credentials(certificates)
        return OpenChannel(self._maker.secure_channel(target, credentials, options=options), self._shown)


def channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    """Returns certificates as gRPC takes them."""
    return grpc.ssl_channel_credentials(certificates.ca, certificates.key, certificates.certificate)


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


def shows_caller(metadata: Metadata) -> bool:
    """Returns True if metadata of a call show who makes it, in place of what its client shows."""
    return bool(metadata) and any(key == _AUTHORIZATION for key, _ in metadata)


def _make_unary(channel: Any, show: Callable[[Any], Any], service: str, method: str) -> Any:
    found = unary_method(service, method)
    return show(channel.unary_unary(found.path, found.encode, found.decode))


class _Showing:
    """A function of a channel that makes calls, each of which shows who makes it."""

    def __init__(self, call: Any, shown: CallCredentials) -> None:
        self._call = call
        self._shown = shown

    def __call__(self, request: Any, *, timeout: float | None, metadata: Metadata = ()) -> Any:
        return self._call(request, timeout=timeout, metadata=self._with_shown(metadata))

    def future(self, request: Any, *, timeout: float | None, metadata: Metadata = ()) -> Any:
        return self._call.future(request, timeout=timeout, metadata=self._with_shown(metadata))

    def _with_shown(self, metadata: Metadata) -> Metadata:
        return metadata if shows_caller(metadata) else (*self._shown.metadata, *metadata)


def _showing(shown: CallCredentials, call: Any) -> Any:
    return _Showing(call, shown) if shown.is_something else call


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


class UploadParts:
    """The messages of a PutTensors stream, for gRPC, which takes one after the other."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload

    def __iter__(self) -> Iterator[tensor_messages_pb2.PutTensorsRequest | Chunk]:
        """Yields the messages."""
        yield tensor_messages_pb2.PutTensorsRequest(header=self._upload.header)
        progress = self._upload.progress
        if progress is not None:
            progress.begin()
        for chunk in cut(map(buffer_of, self._upload.arrays)):
            yield chunk
            if progress is not None:
                progress.moved(chunk.num_bytes)  # now gRPC wants the next one


class DownloadParts:
    """Reads the messages of a GetTensors stream into arrays."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._arrays: list[Array] = []
        self._progress = progress
        if progress is not None:
            progress.begin()
        self._assembly: Assembly | None = None

    def add(self, part: tensor_messages_pb2.GetTensorsResponse | memoryview) -> None:
        """Adds the next message.

        Raises:
            InternalError: It does not follow the protos.
        """
        try:
            if isinstance(part, memoryview):
                if self._assembly is None:
                    raise InternalError("the server sent a chunk before the header")
                self._assembly.write(part)
                if self._progress is not None:
                    self._progress.moved(len(part))
            else:
                self._arrays = [np.empty(tuple(spec.shape), to_dtype(spec.dtype)) for spec in part.header.tensors]
                self._assembly = Assembly(self._arrays)
        except (PayloadError, ValueError) as error:
            raise InternalError(f"the server sent a malformed stream: {error}") from None

    def finish(self) -> list[Array]:
        """Returns the arrays.

        Raises:
            InternalError: Something is missing.
        """
        if self._assembly is None:
            raise InternalError("the server sent an empty stream")
        try:
            self._assembly.finish()
        except PayloadError as error:
            raise InternalError(f"the server sent a malformed stream: {error}") from None
        return self._arrays
