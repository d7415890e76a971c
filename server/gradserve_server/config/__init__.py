"""The configuration of a server: one frozen model per concern.

Each field is a command-line flag (`--max-bytes`), an environment variable (`GRADSERVE_MAX_BYTES`) and an entry of
the TOML file (`max_bytes`). A flag overrides the variable, and the variable overrides the file. Sizes are numbers of
bytes or strings such as "4GiB". `Expected` has the words for messages about a field.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, ValidationInfo

from gradserve_server.config.fields import (
    MAX_BYTES,
    MAX_SECONDS,
    NUMBER,
    Bytes,
    Concern,
    Count,
    Expected,
    Seconds,
)
from gradserve_server.config.servers import ClusterConfig, UpstreamConfig
from gradserve_server.runtime.process import memory_bytes, num_cores

MIB = 1 << 20
_LEAST_MESSAGE_BYTES = 4 * MIB
_MAX_MESSAGE_BYTES = (1 << 31) - 1
_MAX_THREADS = 1024
_BYTES_OF_A_CALL = 32 << 10
_LEAST_CALLS = 2048
_BYTES_OF_A_CONNECTION = 16 << 10
_LEAST_CONNECTIONS = 1024


def _lower_case(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _listenable(text: str) -> str:
    # Imported late, because this imports gRPC, which then reads the settings of its own log.
    from gradserve_protocol.address import Address

    return str(Address.to_listen(text))


def _bulk_listenable(text: str) -> str:
    if text in ("auto", "off"):
        return text
    from gradserve_protocol.address import Address

    address = Address.to_listen(text)
    if address.path:
        raise ValueError(f"expected HOST:PORT, auto or off, got {text!r}")
    return str(address)


def _socket_path(text: str) -> str:
    if text in ("auto", "off"):
        return text
    from gradserve_protocol.address import Address

    return Address.to_listen(text if text.startswith("unix:") else f"unix:{text}").path


def _each_once(addresses: tuple[str, ...]) -> tuple[str, ...]:
    for address in addresses:
        if not address.endswith(":0") and addresses.count(address) > 1:
            raise ValueError(f"expected each address once, got {address!r} twice")
    return addresses


def _half_of_memory() -> ByteSize:
    return ByteSize(memory_bytes() // 2)


def _message_bytes(given: dict[str, int]) -> ByteSize:
    return ByteSize(min(max(given["max_bytes"] // 16, _LEAST_MESSAGE_BYTES), 16 * MIB))


def _queued_bytes(given: dict[str, int]) -> ByteSize:
    return ByteSize(max(given["max_bytes"] // 8, 4 * given["max_message_bytes"]))


def _calls(given: dict[str, int]) -> int:
    return min(max(given["max_bytes"] // 8 // _BYTES_OF_A_CALL, _LEAST_CALLS), 100_000)


def _connections(given: dict[str, int]) -> int:
    return min(max(given["max_bytes"] // 16 // _BYTES_OF_A_CONNECTION, _LEAST_CONNECTIONS), 10_000)


GpuSharingUsers = Literal["user", "all", "off"]


class ListenConfig(Concern):
    """The addresses on which the server listens."""

    listen: Annotated[
        tuple[Annotated[str, AfterValidator(_listenable)], ...],
        AfterValidator(_each_once),
        Field(
            min_length=1,
            description="HOST:PORT (port 50051 by default, 0 for a free one) or unix:PATH; repeatable",
        ),
        Expected('a list of addresses such as ["0.0.0.0:50051", "unix:/run/gradserve.sock"]'),
    ] = ("127.0.0.1:50051",)
    bulk_listen: Annotated[
        str,
        AfterValidator(_bulk_listenable),
        Field(
            description="HOST:PORT of the bulk socket, which carries large tensors beside gRPC; auto for a free port "
            "on each TCP address of --listen, off for none"
        ),
        Expected("HOST:PORT, auto or off"),
    ] = "auto"
    shared_memory_socket: Annotated[
        str,
        AfterValidator(_socket_path),
        Field(
            description="path of the Unix socket through which clients on this machine share memory; auto for one "
            "beside the Unix socket of --listen, or else in the runtime or temporary folder; off for none"
        ),
        Expected("a path, auto or off"),
    ] = "auto"
    gpu_sharing: Annotated[
        GpuSharingUsers,
        BeforeValidator(_lower_case),
        Field(
            description="whose programs on this machine may hand over memory of the GPU on which ops run, through the "
            "Unix socket: the server's own user's, those of all users who can open the socket, or nobody's: off"
        ),
        Expected("user, all or off"),
    ] = "user"
    http_listen: Annotated[
        str,
        AfterValidator(_bulk_listenable),
        Field(
            description="HOST:PORT of the HTTP port, with metrics and the status page; auto for port 50080 on "
            "127.0.0.1, or a free one if that is taken; off for none"
        ),
        Expected("HOST:PORT, auto or off"),
    ] = "auto"
    http_host: Annotated[
        tuple[Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")], ...],
        Field(
            description="name by which browsers and scrapers may reach the HTTP port, beside localhost and IP "
            "addresses; repeatable"
        ),
        Expected('a list of names such as ["gradserve", "gradserve.example.com"]'),
    ] = ()
    address_file: Annotated[
        str | None,
        Field(min_length=1, description="file for the bound addresses, one per line, while the server serves"),
        Expected("the path of a file"),
    ] = None
    rounds_file: Annotated[
        str | None,
        Field(
            min_length=1,
            description="file for the rounds that are still open after SIGUSR1, which holds new ones until SIGUSR2",
        ),
        Expected("the path of a file"),
    ] = None


def _with_state_dir(value: str | None, given: ValidationInfo) -> str | None:
    if value is not None and given.data.get("state_dir") is None:
        raise ValueError("expected state_dir as well: the directory that is backed up")
    return value


class StateConfig(Concern):
    """The state on disk, and its backups."""

    state_dir: Annotated[
        str | None,
        Field(min_length=1, description="directory for what survives a crash; without one nothing does"),
        Expected("the path of a directory"),
    ] = None
    durability: Annotated[
        Literal["none", "round", "gradient"],
        BeforeValidator(_lower_case),
        Field(
            description="what survives of accumulators that ask for nothing else, with a state directory: none, "
            "rounds that have ended, or every gradient"
        ),
        Expected("none, round or gradient"),
    ] = "round"
    backup_dir: Annotated[
        str | None,
        Field(
            min_length=1,
            description="folder in which the server keeps backups of its state directory, which it takes while it "
            "serves (default: it takes none)",
        ),
        AfterValidator(_with_state_dir),
        Expected("the path of a directory"),
    ] = None
    backup_interval_seconds: Annotated[
        Seconds, Field(description="with --backup-dir: time from the beginning of one backup to that of the next")
    ] = 3600.0
    backup_keep: Annotated[
        Count, Field(description="with --backup-dir: backups that are kept; older ones are removed")
    ] = 3


def _with_certificate(key: str | None, given: ValidationInfo) -> str | None:
    if key is not None and given.data.get("tls_certificate") is None:
        raise ValueError("expected tls_certificate as well: the certificate of the key")
    return key


def _with_key(authorities: str | None, given: ValidationInfo) -> str | None:
    if authorities is not None and given.data.get("tls_certificate") is None:
        raise ValueError("expected tls_certificate and tls_key as well: clients show certificates to servers with one")
    return authorities


class TlsConfig(Concern):
    """The files that encrypt connections over TCP, in PEM format. They are read again when they change."""

    tls_certificate: Annotated[
        str | None,
        Field(
            min_length=1,
            description="file with the server's certificate, and those between it and its authority; with it, "
            "connections over TCP are encrypted",
        ),
        Expected("the path of a file"),
    ] = None
    tls_key: Annotated[
        str | None,
        Field(min_length=1, description="file with the private key of the certificate, without a password"),
        AfterValidator(_with_certificate),
        Expected("the path of a file"),
    ] = None
    tls_client_ca: Annotated[
        str | None,
        Field(
            min_length=1,
            description="file with the certificates of authorities; clients have to show a certificate of one of them",
        ),
        AfterValidator(_with_key),
        Expected("the path of a file"),
    ] = None


class LimitsConfig(Concern):
    """The limits for clients."""

    max_bytes: Annotated[
        Bytes,
        Field(description="memory for tensors, uploads, accumulators and layers (default: half of all memory)"),
    ] = Field(default_factory=_half_of_memory)
    max_device_bytes: Annotated[
        ByteSize | None,
        NUMBER,
        Field(
            gt=0,
            le=MAX_BYTES,
            description="memory of the GPU for tensors and computations (default: all of it but a margin "
            "for CUDA); has no effect if ops run on the CPU",
        ),
        Expected("a size such as 4GiB or 512MiB"),
    ] = None
    max_message_bytes: Annotated[
        ByteSize,
        NUMBER,
        Field(
            ge=_LEAST_MESSAGE_BYTES,
            le=_MAX_MESSAGE_BYTES,
            description="longest request message, at least 4 MiB (default: 16 MiB, or a sixteenth of max_bytes if that "
            "is less)",
        ),
        Expected("a size from 4MiB to less than 2GiB, such as 16MiB"),
    ] = Field(default_factory=_message_bytes)
    inline_limit_bytes: Annotated[Bytes, Field(description="largest size at which results placed AUTO come inline")] = (
        ByteSize(3 * MIB)
    )
    max_inflight_bytes: Annotated[
        Bytes, Field(description="payloads that may be arriving at one time; others wait for their turn")
    ] = ByteSize(256 * MIB)
    min_arrival_rate: Annotated[
        Bytes,
        Field(
            description="bytes per second with which payloads, uploads, and long messages on sockets have to arrive "
            "while others wait for the room that they take"
        ),
    ] = ByteSize(16 << 10)
    max_queued_bytes: Annotated[
        Bytes,
        Field(
            description="memory for requests that arrive slowly over gRPC, and as much for replies that their clients "
            "have not read (default: an eighth of max_bytes, but at least four of the longest messages)"
        ),
    ] = Field(default_factory=_queued_bytes)
    message_idle_seconds: Annotated[
        Seconds,
        Field(
            description="how long a request may take to arrive over gRPC, and how long replies may wait for a client "
            "that reads none of them"
        ),
    ] = 60.0
    max_calls: Annotated[
        Count,
        Field(
            description="calls over gRPC under way at once (default: one for 256 KiB of max_bytes, at least 2048 and "
            "at most 100,000)"
        ),
    ] = Field(default_factory=_calls)
    max_connection_calls: Annotated[
        Count, Field(description="calls under way at once over one connection of gRPC; further ones wait at the client")
    ] = 256
    max_connections: Annotated[
        Count,
        Field(
            description="connections to each address of gRPC, and as many to sockets (default: one for 256 KiB of "
            "max_bytes, at least 1024 and at most 10,000)"
        ),
    ] = Field(default_factory=_connections)
    max_region_bytes: Annotated[
        Bytes, Field(description="memory that clients on this machine may share (default: half of all memory)")
    ] = Field(default_factory=_half_of_memory)
    max_gpu_region_bytes: Annotated[
        Bytes, Field(description="memory of the GPU that clients on this machine may hand over, which is theirs")
    ] = ByteSize(1024 * 1024 * MIB)
    max_handles: Annotated[Count, Field(description="stored tensors, and forwards that layers keep")] = 1_000_000
    max_accumulators: Annotated[Count, Field(description="accumulators and parameters")] = 100_000
    max_layers: Annotated[Count, Field(description="batch normalization layers")] = 100_000
    max_waiters: Annotated[Count, Field(description="calls waiting at once")] = 100_000
    reserved_share: Annotated[
        float,
        NUMBER,
        Field(
            ge=0,
            le=0.5,
            description="with --access: fraction of memory, calls and connections for identities that use no more "
            "than that",
        ),
        Expected("a number from 0 to 0.5"),
    ] = 0.1
    id_window: Annotated[Count, Field(description="request ids remembered for each client of an accumulator")] = 1024
    max_clients: Annotated[Count, Field(description="clients whose request ids one accumulator remembers")] = 10_000
    client_memory_seconds: Annotated[
        Seconds, Field(description="how long the request ids of a silent client are remembered")
    ] = 3600.0
    undelivered_lease_seconds: Annotated[
        Seconds,
        Field(description="how long an average is kept for a call that may not have received it"),
    ] = 60.0

    @property
    def bookkeeping_bytes(self) -> int:
        """The memory for names, ids, specs and whatever else the server keeps beside tensors."""
        return max(self.max_bytes // 8, 16 * MIB)


class LeaseConfig(Concern):
    """The lifetimes of unused resources."""

    default_lease_seconds: Annotated[Seconds, Field(description="default lease of a tensor, in seconds")] = 600.0
    max_lease_seconds: Annotated[Seconds, Field(description="longest lease of a tensor, in seconds")] = 86400.0
    client_lease_seconds: Annotated[
        Seconds, Field(description="how long a client's private resources outlive its last sign of life")
    ] = 60.0


class RuntimeConfig(Concern):
    """The device, the threads, the times and the log of the server."""

    device: Annotated[
        str,
        Field(
            pattern=r"^(auto|cpu|cuda(:\d+)?)$",
            description="device for ops: cpu, cuda:N, or auto for the first GPU if there is one",
        ),
        Expected("cpu, cuda, cuda:N or auto"),
    ] = "auto"
    accumulator_device: Annotated[
        str,
        Field(
            pattern=r"^(cpu|cuda:\d+|auto)$",
            description="where accumulators are that ask for no device: cpu, or the device for ops by name or as auto",
        ),
        Expected("cpu, cuda:N or auto"),
    ] = "cpu"
    warm_up: Annotated[
        bool,
        Field(
            description="load or compile the kernels of float32 sums at the start; others follow when calls need them"
        ),
        Expected("true or false"),
    ] = True
    warm_up_ops: Annotated[
        bool,
        Field(description="load or compile all kernels at the start, also those of ops that nobody calls"),
        Expected("true or false"),
    ] = False
    compute_threads: Annotated[
        int,
        NUMBER,
        Field(gt=0, le=_MAX_THREADS, description="threads for arithmetic (default: one per core)"),
        Expected(f"a whole number from 1 to {_MAX_THREADS}"),
    ] = Field(default_factory=num_cores)
    pool_bytes: Annotated[
        ByteSize,
        NUMBER,
        Field(ge=0, le=MAX_BYTES, description="freed buffer memory kept for the next tensors"),
        Expected("a size such as 4GiB or 512MiB, or 0"),
    ] = ByteSize(1024 * MIB)
    stream_idle_seconds: Annotated[Seconds, Field(description="how long an upload may pause between messages")] = 60.0
    drain_seconds: Annotated[Seconds, Field(description="how long streams may go on after SIGTERM")] = 30.0
    event_loop_warning_seconds: Annotated[
        float | None,
        NUMBER,
        Field(
            gt=0,
            le=MAX_SECONDS,
            allow_inf_nan=False,
            description="log what keeps the event loop busy for longer than this (default: nothing)",
        ),
        Expected("a number of seconds greater than 0, such as 0.02"),
    ] = None
    log_format: Annotated[
        Literal["text", "json"],
        BeforeValidator(_lower_case),
        Field(description="lines of the log: text for people, or json for programs"),
        Expected("text or json"),
    ] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        BeforeValidator(_lower_case),
        Field(
            description="lowest level that is logged: debug, info, warning or error; debug shows each call and round"
        ),
        Expected("debug, info, warning or error"),
    ] = "info"
    tracing: Annotated[
        bool,
        Field(description="send spans of calls, waits and rounds where the OTEL_... variables say"),
        Expected("true or false"),
    ] = False


class SecurityConfig(Concern):
    """The access to the server."""

    access: Annotated[
        str | None,
        Field(min_length=1, description="TOML file that says who may do what; without it, everybody may do everything"),
        Expected("the path of a file"),
    ] = None


class ServerConfig(Concern):
    """The whole configuration of a server."""

    listen: ListenConfig = Field(default_factory=ListenConfig)
    state: StateConfig = Field(default_factory=StateConfig)
    tls: TlsConfig = Field(default_factory=TlsConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    leases: LeaseConfig = Field(default_factory=LeaseConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    security: SecurityConfig = Field(default_factory=SecurityConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    upstream: UpstreamConfig = Field(default_factory=UpstreamConfig)
