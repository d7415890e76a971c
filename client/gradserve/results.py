"""The arguments and results of calls."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from gradserve_protocol.arrays import Array
from gradserve_protocol.printing import abbreviated

DTypeLike: TypeAlias = npt.DTypeLike | Any
"""A dtype of NumPy, its name, or a dtype of another library: torch.float32, tf.float32, jnp.float32."""
Shape: TypeAlias = tuple[int | None, ...]
"""A shape, with None for a dimension of any size."""


class SupportsDLPack(Protocol):
    """A tensor of any library that exports its memory as https://dmlc.github.io/dlpack says."""

    def __dlpack__(self) -> Any:
        """Returns the DLPack capsule."""
        ...

    def __dlpack_device__(self) -> tuple[Any, Any]:
        """Returns the device of the tensor."""
        ...


ArrayLike: TypeAlias = npt.ArrayLike | SupportsDLPack
"""An array or tensor of any library, or numbers in lists of any depth."""


class Outcome(Enum):
    """The outcome of applying a gradient."""

    ACCEPTED = "ACCEPTED"
    """The gradient is in the current round."""
    STALE = "STALE"
    """The gradient's local_step was smaller than the accumulator's global_step. It was dropped."""
    ALREADY_COUNTED = "ALREADY_COUNTED"
    """The current round already has a gradient of the same worker. This one was dropped."""


ACCEPTED = Outcome.ACCEPTED
STALE = Outcome.STALE


@dataclass(frozen=True)
class ApplyResult:
    """The outcome of applying a gradient, and the accumulator's state after it.

    Attributes:
        outcome: ACCEPTED or STALE; ALREADY_COUNTED if the accumulator counts one gradient per worker.
        duplicate: Whether this is the answer to an earlier call with the same request_id.
        global_step: The accumulator's step after the call.
        num_accumulated: The number of gradients in the round after the call.
    """

    outcome: Outcome
    duplicate: bool
    global_step: int
    num_accumulated: int


@abbreviated
@dataclass(frozen=True, eq=False, repr=False)
class IndexedSlices:
    """Rows of a larger tensor, like TensorFlow's IndexedSlices.

    Attributes:
        values: The rows, shape [n, ...].
        indices: The row numbers, shape [n]; int64 in results.
        dense_shape: The shape of the whole tensor, with -1 for unknown sizes; None if not given.
    """

    values: NDArray[Any]
    indices: NDArray[Any]
    dense_shape: tuple[int, ...] | None = None


Value: TypeAlias = Array | IndexedSlices


@dataclass(frozen=True)
class DenseSpec:
    """A dense component of a gradient accumulator.

    Attributes:
        dtype: float16, bfloat16, float32 or float64.
        shape: The shape of every gradient; None is an unknown dimension, or an unknown shape.
    """

    dtype: DTypeLike
    shape: Shape | None = None


@dataclass(frozen=True)
class SparseSpec:
    """A sparse component of a gradient accumulator, given as IndexedSlices.

    Attributes:
        dtype: float16, bfloat16, float32 or float64.
        shape: The shape of the whole tensor; None is an unknown dimension, or an unknown shape.
    """

    dtype: DTypeLike
    shape: Shape | None = None


@abbreviated
@dataclass(frozen=True, repr=False)
class DifferentWorker:
    """A worker whose parameters are not those of most workers of a round.

    Attributes:
        worker_id: Its id.
        equal_at: The latest step at which they were; None if at no step that the server remembers.
    """

    worker_id: str
    equal_at: int | None = None


@abbreviated
@dataclass(frozen=True, eq=False, repr=False)
class Average(Mapping[str, NDArray[Any] | Any]):
    """The result of a round: a mapping from component names to arrays (or IndexedSlices).

    Type checkers see every item as an array; use isinstance where it may be IndexedSlices.

    Attributes:
        components: Arrays (or IndexedSlices) by name.
        gradients: The same as a tree, of the structure that the accumulator was made of, for example for
            `jax.tree.map(lambda p, g: p - rate * g, params, average.gradients)`.
        step: The global_step that the round led to: the local_step of the next gradient.
        num_gradients: The number of gradients in it.
        total_weight: The sum of their weights: the weight to use when passing this average on.
        worker_ids: The ids of the workers that sent them.
        different_workers: The workers whose `parameters_digest` was not that of most.
    """

    components: Mapping[str, NDArray[Any] | IndexedSlices]
    gradients: Any = field(repr=False)
    step: int
    num_gradients: int
    total_weight: float
    worker_ids: tuple[str, ...]
    different_workers: tuple[DifferentWorker, ...] = field(default=(), kw_only=True, repr=False)

    def __getitem__(self, name: str) -> NDArray[Any] | Any:
        return self.components[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.components)

    def __len__(self) -> int:
        return len(self.components)


@abbreviated
@dataclass(frozen=True, eq=False, repr=False)
class PushPullResult(Average):
    """The average of a gradient's round; if the gradient was stale, of the newest round that is kept.

    If the gradient was stale and no average is kept, it is empty, with `step` equal to `global_step` and None as
    `gradients`.

    Attributes:
        outcome: ACCEPTED; STALE; or ALREADY_COUNTED if the round has an earlier gradient of the same worker instead.
        duplicate: Whether this is the answer to an earlier call with the same request_id.
        global_step: The accumulator's current step.
    """

    outcome: Outcome
    duplicate: bool
    global_step: int


@abbreviated
@dataclass(frozen=True, repr=False)
class AccumulatorInfo:
    """The state of an accumulator at one moment.

    Attributes:
        container: The namespace of its name.
        name: Its name.
        global_step: Its step.
        num_accumulated: The number of gradients accepted since the last take.
        num_waiting: The number of calls that wait for the end of a round.
        num_bytes: The memory it uses.
        worker_ids: The ids of the workers that sent the gradients since the last take.
        kept_steps: The steps whose averages can still be read.
        is_private: Whether it is private to the client that made it, and deleted with it.
        idle_lease: Seconds without use after which it is deleted; None: never.
        device: The device in whose memory its sums and averages are: "cpu", "cuda:0", ...
        agreement: The texts by name on which all who create or find it must agree.
        incarnation: An id that distinguishes it from a later accumulator with the same name.
        num_shards: The number of servers over which it is sharded; 0 if it is on one server as a whole.
        different_workers: `Average.different_workers` of the latest round in which two workers or more sent digests.
    """

    container: str
    name: str
    global_step: int
    num_accumulated: int
    num_waiting: int
    num_bytes: int
    worker_ids: tuple[str, ...]
    kept_steps: tuple[int, ...]
    is_private: bool
    idle_lease: float | None
    device: str
    agreement: Mapping[str, str]
    incarnation: str
    num_shards: int = 0
    different_workers: tuple[DifferentWorker, ...] = ()


class AccumulatorKind(Enum):
    """The kind of gradients that an accumulator of one tensor takes."""

    DENSE = "DENSE"
    """Arrays."""
    SPARSE = "SPARSE"
    """Rows of an array, with their numbers."""


@abbreviated
@dataclass(frozen=True, repr=False)
class AccumulatorHandle:
    """A reference to an accumulator of one tensor, valid in any client of the server.

    The ops of `RawOps` that make accumulators return it, and the other accumulator ops take it.

    Attributes:
        container: The namespace of the accumulator's name.
        name: The accumulator's name.
        incarnation: An id that distinguishes it from a later accumulator with the same name.
        dtype: The dtype of its gradients.
        kind: DENSE or SPARSE.
    """

    container: str
    name: str
    incarnation: str
    dtype: np.dtype[np.generic]
    kind: AccumulatorKind


@abbreviated
class SparseAccumulatorTakeGradientOutputs(NamedTuple):
    """Outputs of SparseAccumulatorTakeGradient; see `RawOps.SparseAccumulatorTakeGradient`."""

    indices: NDArray[np.int64]
    values: NDArray[Any]
    shape: NDArray[np.int64]


@abbreviated
@dataclass(frozen=True, repr=False)
class TensorHandle:
    """A reference to a tensor on the server.

    Attributes:
        handle: The tensor's unguessable name.
        dtype: The element type.
        shape: The shape.
    """

    handle: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]


Tensor: TypeAlias = NDArray[Any] | TensorHandle
"""A result: an array, or the handle of a tensor that the call was told to keep on the server."""

TensorLike: TypeAlias = ArrayLike | TensorHandle
"""An array or tensor of any library, numbers, or the handle of a tensor on the server."""

TensorT_co = TypeVar("TensorT_co", bound=Tensor, covariant=True)
"""The type of the results of one call."""


@dataclass(frozen=True)
class Device:
    """A device of the server's machine.

    Attributes:
        name: "cpu" or "cuda:N".
        description: A description in words.
        total_memory_bytes: The size of its memory.
    """

    name: str
    description: str
    total_memory_bytes: int


@dataclass(frozen=True)
class TransportInfo:
    """The way that a client's calls take to the server.

    Attributes:
        way: "shared_memory" or "bulk", a socket beside gRPC, or "grpc"; "in_process" for a server of a test.
        why_not_faster: Why no faster way is in use; empty for the fastest.
        num_sockets: Over how many sockets one call's large tensors travel at once: several if the way is "bulk" and
            the link is long.
        gpu_arrays: How arrays of a GPU travelled last if the way is "shared_memory": "in place", the server using them
            where they are, or "copied to the host: " and why; empty if there were none. Other ways copy them.
    """

    way: str
    why_not_faster: str
    num_sockets: int = 1
    gpu_arrays: str = ""


@dataclass(frozen=True)
class ServerInfo:
    """The server's version, devices, limits and load.

    Attributes:
        version: The version of its gradserve distribution.
        devices: Its devices; at least the CPU.
        device: The name of the device that ops run on.
        ops_prepared: Whether the kernels are loaded that calls have asked for, as an op's first call does; before that,
            calls take longer, and the last digits of their results may differ from those afterwards.
        limits: The limits by name, as in ServerLimits in the protos; durations in seconds.
        usage: The usage by name, as in ServerUsage in the protos.
        uptime: Seconds since it started.
        sockets: Its sockets beside gRPC: "HOST:PORT", with "*" for the host of its gRPC address, or "unix:PATH".
        transport: The way that this client's calls take.
        incarnation: A random id of this run of the server, empty if it is too old to have one.
        identities: What the caller uses, by its name, if the server has access control; for an admin of all
            containers, what each identity uses. Names as in ShareUsage in the protos.
        containers: What containers use, likewise; see GetServerInfoResponse in the protos.
        why_no_gpu: Why there is no GPU among `devices`; empty if there is.
        device_usage: What the GPU that ops run on does, as in DeviceUsage in the protos; empty if ops run on the CPU.
        http_url: Where its status page and metrics are, as the server names it; empty if it has no HTTP port.
        member: Its place in its cluster, "CLUSTER INDEX/SIZE", such as "train 0/3"; empty if it is in none.
        upstream: Where it passes gradients on if it is an aggregator: an address, or several with commas between them;
            empty if it is none.
        time: What its clock said when it answered, in seconds since 1970; 0 if it is too old to say so.
        state_disk: The file system of its state directory, as in DiskUsage in the protos; empty if it has none.
    """

    version: str
    devices: tuple[Device, ...]
    device: str
    ops_prepared: bool
    limits: Mapping[str, float]
    usage: Mapping[str, float]
    uptime: float
    sockets: tuple[str, ...]
    transport: TransportInfo
    incarnation: str = ""
    identities: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    containers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    why_no_gpu: str = ""
    device_usage: Mapping[str, float] = field(default_factory=dict)
    http_url: str = ""
    member: str = ""
    upstream: str = ""
    time: float = field(default=0.0, repr=False)
    state_disk: Mapping[str, float] = field(default_factory=dict)
