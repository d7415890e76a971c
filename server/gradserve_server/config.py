"""The configuration of a server: one frozen model per concern.

Each field is a command-line flag (`--max-bytes`), an environment variable (`GRADSERVE_MAX_BYTES`) and an entry of
the TOML file (`max_bytes`); the flag wins over the variable, the variable over the file. Sizes are numbers of bytes
or strings such as "4GiB".
"""

from typing import Annotated

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from gradserve_server.machine import memory_bytes, num_cores

MIB = 1 << 20
Bytes = Annotated[ByteSize, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _half_of_memory() -> ByteSize:
    return ByteSize(memory_bytes() // 2)


class _Concern(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ListenConfig(_Concern):
    """Where the server listens."""

    listen: Annotated[
        tuple[str, ...],
        Field(min_length=1, description="HOST:PORT (port 0 picks a free one) or unix:PATH; repeatable"),
    ] = ("127.0.0.1:50051",)
    address_file: Annotated[
        str | None,
        Field(description="write the bound addresses here, one a line, once serving"),
    ] = None


class LimitsConfig(_Concern):
    """What clients may take."""

    max_message_bytes: Annotated[ByteSize, Field(ge=4 * MIB, description="longest request message, at least 4 MiB")] = (
        ByteSize(16 * MIB)
    )
    inline_limit_bytes: Annotated[Bytes, Field(description="up to which size results placed AUTO come inline")] = (
        ByteSize(3 * MIB)
    )
    max_bytes: Annotated[
        Bytes,
        Field(description="memory for tensors, uploads, accumulators and layers (default: half of what there is)"),
    ] = Field(default_factory=_half_of_memory)
    max_handles: Annotated[Count, Field(description="stored tensors, and forwards that layers keep")] = 1_000_000
    max_accumulators: Annotated[Count, Field(description="accumulators")] = 100_000
    max_layers: Annotated[Count, Field(description="batch normalization layers")] = 100_000
    max_waiters: Annotated[Count, Field(description="calls waiting at once")] = 100_000
    id_window: Annotated[Count, Field(description="request ids remembered for each client of an accumulator")] = 1024
    max_clients: Annotated[Count, Field(description="clients whose request ids one accumulator remembers")] = 10_000
    client_memory_seconds: Annotated[
        Seconds, Field(description="how long the request ids of a silent client are remembered")
    ] = 3600.0
    undelivered_lease_seconds: Annotated[
        Seconds,
        Field(description="how long an average is kept for a call that may not have received it"),
    ] = 60.0


class LeaseConfig(_Concern):
    """How long stored tensors live without use."""

    default_lease_seconds: Annotated[Seconds, Field(description="lease when none is asked for, in seconds")] = 600.0
    max_lease_seconds: Annotated[Seconds, Field(description="longest lease, in seconds")] = 86400.0


class RuntimeConfig(_Concern):
    """How the server runs."""

    device: Annotated[
        str,
        Field(
            pattern=r"^(auto|cpu|cuda(:\d+)?)$",
            description="what ops run on: cpu, cuda:N, or auto for the first GPU if there is one",
        ),
    ] = "auto"
    warm_up: Annotated[bool, Field(description="load or compile the kernels of the ops at the start")] = True
    compute_threads: Annotated[Count, Field(description="threads for arithmetic (default: one per core)")] = Field(
        default_factory=num_cores
    )
    pool_bytes: Annotated[ByteSize, Field(ge=0, description="freed buffer memory kept for the next tensors")] = (
        ByteSize(1024 * MIB)
    )
    stream_idle_seconds: Annotated[
        Seconds, Field(description="an upload without a message for so long is broken off")
    ] = 60.0
    drain_seconds: Annotated[Seconds, Field(description="how long streams may go on after SIGTERM")] = 30.0


class ServerConfig(_Concern):
    """All of it."""

    listen: ListenConfig = Field(default_factory=ListenConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    leases: LeaseConfig = Field(default_factory=LeaseConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
