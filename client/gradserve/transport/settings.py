"""The settings of a connection, as the arguments of `connect` and the environment variables ask for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Self, TypeAlias

from gradserve.calls.accumulators.kept import DEFAULT_KEPT_BYTES
from gradserve.calls.exchange import TimeLimits, check_timeout
from gradserve.calls.retries import RetryPolicy
from gradserve.conversion.plain import as_choice
from gradserve.interceptors import Interceptors, checked_interceptors
from gradserve.tracing import CallTracer, TracedAttempts, tracer_of
from gradserve_protocol.argument import Argument
from gradserve_protocol.frames import MAX_STRANDS
from gradserve_protocol.tls import TLS, CertificateFiles, client_certificates
from gradserve_protocol.variables import (
    ADDRESS_VARIABLE,
    BULK_SOCKETS_VARIABLE,
    DEFAULT_ADDRESS,
    GPU_ARRAYS_VARIABLE,
    KEPT_BYTES_VARIABLE,
    TLS_FILE_VARIABLES,
    TLS_VARIABLE,
    TOKEN_VARIABLE,
    TRACING_VARIABLE,
    TRANSPORT_VARIABLE,
)

_MAX_CHARACTERS = 1024
_ON = ("1", "on", "true", "yes")
_OFF = ("", "0", "off", "false", "no")
TransportName: TypeAlias = Literal["auto", "shared_memory", "bulk", "grpc"]
"""The words for transports."""


def wanted_server(
    address: str | Sequence[str] | None, tls: TLS | None, environment: Mapping[str, str]
) -> tuple[str | Sequence[str], TLS | None]:
    """Returns the address and the TLS files of `connect`'s arguments, or, without an address, of the environment.

    A server that an argument names does not get the TLS of the environment, which may be about another one.

    Raises:
        InvalidArgumentError: The variables do not say what they should.
    """
    if address is not None:
        return address, tls
    return environment.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS, tls_in(environment) if tls is None else tls


def tls_in(environment: Mapping[str, str]) -> TLS | None:
    """Returns the TLS files that the environment names; None if it asks for no TLS.

    Raises:
        InvalidArgumentError: GRADSERVE_TLS is neither on nor off.
    """
    files = {name: environment.get(variable) or None for name, variable in TLS_FILE_VARIABLES.items()}
    return TLS(**files) if any(files.values()) or _is_on(TLS_VARIABLE, environment) else None


class Way(StrEnum):
    """A way for calls to the server."""

    SHARED_MEMORY = "shared_memory"
    BULK = "bulk"
    GRPC = "grpc"
    IN_PROCESS = "in_process"


class Transport(StrEnum):
    """The transport that a user asks for: the fastest that works, or a certain way."""

    AUTO = "auto"
    SHARED_MEMORY = "shared_memory"
    BULK = "bulk"
    GRPC = "grpc"

    @classmethod
    def wanted(cls, transport: object, environment: Mapping[str, str]) -> Self:
        """Returns the transport that an argument names, otherwise GRADSERVE_TRANSPORT, otherwise AUTO.

        Args:
            transport: The argument; None if it was not given.
            environment: The environment variables.

        Raises:
            InvalidArgumentError: The argument, or the variable, is not one of these words.
        """
        words = tuple(each.value for each in cls)
        if transport is not None:
            return cls(as_choice(transport, words, Argument("transport")))
        return cls(as_choice(environment.get(TRANSPORT_VARIABLE) or cls.AUTO, words, Argument(TRANSPORT_VARIABLE)))


@dataclass(frozen=True)
class Keepalive:
    """The detection of a lost server, by connections with waiting calls.

    Attributes:
        interval: Seconds without traffic before it asks for a sign of life. Servers allow 10 s and more.
        timeout: Seconds that it then waits for one.
    """

    interval: float = 30.0
    timeout: float = 15.0


@dataclass(frozen=True)
class Reconnecting:
    """The attempts to make a connection that failed or was lost.

    Attributes:
        first_pause: Seconds between the first two attempts; later pauses grow.
        longest_pause: The most seconds between attempts. gRPC's default is 2 minutes, in which a server that is back
            goes unnoticed.
        attempt: Seconds that an attempt may take.
    """

    first_pause: float = 0.1
    longest_pause: float = 0.5
    attempt: float = 20.0


@dataclass(frozen=True)
class MessageSizes:
    """Sizes of messages, in bytes.

    Attributes:
        longest: The longest message that is sent or received, None for any.
        kept: The longest request that is sent again over another connection if the server has not seen it. Inline
            tensors are up to 3 MiB.
    """

    longest: int | None = None
    kept: int = 4 << 20


@dataclass(frozen=True)
class SocketSettings:
    """The use of the server's sockets. Times are in seconds.

    Attributes:
        connect: The most time to connect; a firewall may drop whatever is sent to a port. Both this and the next one
            leave half of a call's time to gRPC.
        hello: The most time for the answer to a hello.
        giving_up: How long a client that gives up a call waits until the server no longer reads its memory. If that
            takes longer, it takes the memory back, which can then be read in place no more.
        first_pause: The time for which calls take gRPC after a socket has failed. It doubles with each further failure.
        longest_pause: The most of it.
        idle: The time after which unused connections are closed.
        max_connections: The most connections. More calls at once take gRPC, where they share a connection.
        kept_bytes: Unused memory that is kept for the arrays of later replies.
        strands: The number of further sockets that a connection gets for its first large payload if the link is long;
            at most 15.
        long_round_trip: The round trip from which on a link is long.
        large_payload: The size from which on a payload is large, in bytes.
        shares_gpu: Whether memory of a GPU may be handed over to the server; otherwise arrays are copied to the host.
    """

    connect: float = 2.0
    hello: float = 5.0
    giving_up: float = 0.2
    first_pause: float = 30.0
    longest_pause: float = 300.0
    idle: float = 60.0
    max_connections: int = 32
    kept_bytes: int = 256 << 20
    strands: int = 3
    long_round_trip: float = 0.01
    large_payload: int = 4 << 20
    shares_gpu: bool = True

    @classmethod
    def wanted(cls, environment: Mapping[str, str]) -> Self:
        """Returns the settings with what GRADSERVE_BULK_SOCKETS and GRADSERVE_GPU_ARRAYS say.

        Raises:
            InvalidArgumentError: The first is not a number from 1 to 16, or the second neither "auto" nor "copy".
        """
        words, variable = ("auto", "copy"), Argument(GPU_ARRAYS_VARIABLE)
        shares_gpu = as_choice(environment.get(GPU_ARRAYS_VARIABLE) or "auto", words, variable) == "auto"
        text = environment.get(BULK_SOCKETS_VARIABLE)
        if not text:
            return cls(shares_gpu=shares_gpu)
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1 + MAX_STRANDS):
            raise Argument(BULK_SOCKETS_VARIABLE).error(f"a number from 1 to {1 + MAX_STRANDS}", text)
        return cls(strands=int(text) - 1, shares_gpu=shares_gpu)


@dataclass(frozen=True)
class Token:
    """A bearer token. Its repr does not show it."""

    value: str = field(repr=False)

    @classmethod
    def wanted(cls, token: object, environment: Mapping[str, str]) -> Self | None:
        """Returns the token of an argument, otherwise of GRADSERVE_TOKEN, otherwise None.

        Args:
            token: The argument; None if it was not given.
            environment: The environment variables.

        Raises:
            InvalidArgumentError: It cannot be a token; the message does not show it.
        """
        if token is not None:
            return cls(_checked(token, Argument("token")))
        value = environment.get(TOKEN_VARIABLE)
        return cls(_checked(value, Argument(TOKEN_VARIABLE))) if value else None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of calls that show it."""
        return (("authorization", f"Bearer {self.value}"),)


@dataclass(frozen=True)
class ConnectionSettings:
    """All settings of a client's connections, with defaults.

    Attributes:
        times: The time limits of calls.
        retries: The retries of calls while the server is unavailable.
        keepalive: The detection of dead connections.
        reconnecting: The attempts to connect again.
        sizes: The sizes of messages.
        transport: The way of calls.
        sockets: The use of the server's sockets.
        certificates: The certificates of connections over TCP; None if they are not encrypted.
        token: The bearer token that is shown to the server; None for none.
        kept_bytes: The most bytes of gradients to keep until they are durable.
        interceptors: What acts around calls and their attempts; the spans of traces are the innermost.
    """

    times: TimeLimits = field(default_factory=TimeLimits)
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    keepalive: Keepalive = field(default_factory=Keepalive)
    reconnecting: Reconnecting = field(default_factory=Reconnecting)
    sizes: MessageSizes = field(default_factory=MessageSizes)
    transport: Transport = Transport.AUTO
    sockets: SocketSettings = field(default_factory=SocketSettings)
    certificates: CertificateFiles | None = None
    token: Token | None = None
    kept_bytes: int = DEFAULT_KEPT_BYTES
    interceptors: Interceptors = field(default_factory=Interceptors)

    @classmethod
    def wanted(
        cls,
        timeout: float,
        transport: object,
        tls: object,
        token: object,
        tracing: object,
        environment: Mapping[str, str],
        interceptors: object = (),
    ) -> Self:
        """Returns the settings that the arguments of `connect` and the environment variables ask for.

        Raises:
            InvalidArgumentError: An argument or a variable is not valid.
        """
        around = checked_interceptors(interceptors)
        tracer = wanted_tracer(tracing, environment)
        if tracer is not None:
            around = (*around, TracedAttempts(tracer))
        return cls(
            TimeLimits(check_timeout(timeout)),
            transport=Transport.wanted(transport, environment),
            sockets=SocketSettings.wanted(environment),
            retries=RetryPolicy.wanted(environment),
            certificates=client_certificates(tls),
            token=Token.wanted(token, environment),
            kept_bytes=_kept_bytes(environment),
            interceptors=Interceptors.of(around),
        )

    @property
    def shares_memory(self) -> bool:
        """True if calls may go by way of shared memory."""
        return self.transport in (Transport.AUTO, Transport.SHARED_MEMORY)


def wanted_tracer(tracing: object, environment: Mapping[str, str]) -> "CallTracer | None":
    """Returns the tracer that the argument asks for, else GRADSERVE_TRACING; None for no traces.

    Args:
        tracing: True for OpenTelemetry's global provider of tracers, a provider, False for no traces; None if the
            argument was not given.
        environment: The environment variables.

    Raises:
        InvalidArgumentError: It is none of these, or OpenTelemetry is not installed.
    """
    source = "tracing"
    if tracing is None:
        source, tracing = TRACING_VARIABLE, _is_on(TRACING_VARIABLE, environment)
    if tracing is False:
        return None
    import gradserve

    return tracer_of(tracing, source, gradserve.__version__)


def _kept_bytes(environment: Mapping[str, str]) -> int:
    text = environment.get(KEPT_BYTES_VARIABLE)
    if not text:
        return DEFAULT_KEPT_BYTES
    if not (text.isascii() and text.isdigit()):
        raise Argument(KEPT_BYTES_VARIABLE).error("a number of bytes", text)
    return int(text)


def _checked(token: object, argument: Argument) -> str:
    expected = f"1 to {_MAX_CHARACTERS} visible ASCII characters without spaces"
    if not isinstance(token, str):
        raise argument.error_saying(expected, type(token).__qualname__)
    if not 0 < len(token) <= _MAX_CHARACTERS or not all("!" <= character <= "~" for character in token):
        raise argument.error_saying(expected, f"other text of {len(token)} characters")
    return token


def _is_on(variable: str, environment: Mapping[str, str]) -> bool:
    text = environment.get(variable, "")
    word = text.strip().lower()
    if word not in (*_ON, *_OFF):
        raise Argument(variable).error("on or off", text)
    return word in _ON
