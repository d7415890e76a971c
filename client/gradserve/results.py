"""What calls take and return."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradserve.abbreviation import abbreviated
from gradserve.array_like import ArrayLike, DTypeLike
from gradserve.wire.payload import Array

Shape: TypeAlias = tuple[int | None, ...]
"""A shape that may be known in part: None for a dimension of any size."""


class Outcome(Enum):
    """What became of a gradient."""

    ACCEPTED = "ACCEPTED"
    """It is in the current round."""
    STALE = "STALE"
    """Its local_step was smaller than the accumulator's global_step: dropped."""
    ALREADY_COUNTED = "ALREADY_COUNTED"
    """A gradient of the same worker is in the current round already: dropped."""


ACCEPTED = Outcome.ACCEPTED
STALE = Outcome.STALE


@dataclass(frozen=True)
class ApplyResult:
    """What became of a gradient.

    Attributes:
        outcome: ACCEPTED or STALE; ALREADY_COUNTED where the accumulator counts one gradient per worker.
        duplicate: This is the answer to an earlier call with the same request_id.
        global_step: The accumulator's step right after.
        num_accumulated: Gradients in the round right after.
    """

    outcome: Outcome
    duplicate: bool
    global_step: int
    num_accumulated: int


@abbreviated
@dataclass(frozen=True, eq=False, repr=False)
class IndexedSlices:
    """Rows of a larger tensor, as TensorFlow's IndexedSlices.

    Attributes:
        values: Shape [n, ...].
        indices: Row numbers, shape [n]; int64 in results.
        dense_shape: Of the whole tensor, -1 where unknown; None when not given.
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
        shape: Of every gradient; None as a dimension, or instead of all, where unknown.
    """

    dtype: DTypeLike
    shape: Shape | None = None


@dataclass(frozen=True)
class SparseSpec:
    """A sparse component of a gradient accumulator, given as IndexedSlices.

    Attributes:
        dtype: float16, bfloat16, float32 or float64.
        shape: Of the whole tensor; None as a dimension, or instead of all, where unknown.
    """

    dtype: DTypeLike
    shape: Shape | None = None


@abbreviated
@dataclass(frozen=True, eq=False, repr=False)
class Average(Mapping[str, NDArray[Any] | Any]):
    """The result of a round: a mapping from the name of a component to its array (or IndexedSlices).

    To type checkers an item is an array; where it may be IndexedSlices, ask isinstance.

    Attributes:
        components: Arrays (or IndexedSlices) by name.
        gradients: The same as a tree of the structure of what the accumulator was made of: for
            `jax.tree.map(lambda p, g: p - rate * g, params, average.gradients)`.
        step: The global_step the round led to: the local_step of the next gradient.
        num_gradients: How many gradients are in it.
        total_weight: The sum of their weights: the weight with which to pass this average on.
        worker_ids: Who sent them.
    """

    components: Mapping[str, NDArray[Any] | IndexedSlices]
    gradients: Any = field(repr=False)
    step: int
    num_gradients: int
    total_weight: float
    worker_ids: tuple[str, ...]

    def __getitem__(self, name: str) -> NDArray[Any] | Any:
        return self.components[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.components)

    def __len__(self) -> int:
        return len(self.components)


@abbreviated
@dataclass(frozen=True, eq=False, repr=False)
class PushPullResult(Average):
    """The average of the round a gradient was in; of the newest round kept if the gradient was stale.

    Empty, with `step` equal to `global_step` and None as `gradients`, when the gradient was stale and no average is
    kept.

    Attributes:
        outcome: ACCEPTED; ALREADY_COUNTED when an earlier gradient of the same worker is in the round instead; STALE.
        duplicate: This is the answer to an earlier call with the same request_id.
        global_step: The accumulator's current step.
    """

    outcome: Outcome
    duplicate: bool
    global_step: int


@abbreviated
@dataclass(frozen=True, repr=False)
class AccumulatorInfo:
    """An accumulator at one moment.

    Attributes:
        container: Its namespace.
        name: Its name.
        global_step: Its step.
        num_accumulated: Gradients accepted since the last take.
        num_waiting: Calls that wait for the end of a round.
        num_bytes: Memory it holds.
        worker_ids: Who sent the gradients since the last take.
        kept_steps: Steps whose average can still be read.
        is_private: It ends with the client that made it.
        idle_lease: Seconds without use after which it ends; None: it does not.
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


class AccumulatorKind(Enum):
    """What the gradients of an accumulator of one tensor are."""

    DENSE = "DENSE"
    """Arrays."""
    SPARSE = "SPARSE"
    """Rows of an array, with their numbers."""


@abbreviated
@dataclass(frozen=True, repr=False)
class AccumulatorHandle:
    """Names an accumulator of one tensor; whoever has the handle can use it, from any client of the server.

    What the ops of `RawOps` that make accumulators return, and the others take.

    Attributes:
        container: Its namespace.
        name: Its name.
        incarnation: Tells it from another one that gets the name after it was deleted.
        dtype: Of its gradients.
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
    """A tensor that lives on the server.

    Attributes:
        handle: Its unguessable name.
        dtype: Element type.
        shape: Sizes.
    """

    handle: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]


Tensor: TypeAlias = NDArray[Any] | TensorHandle
"""A result: an array, or the handle of one that stays on the server, where the call was told to keep it there."""

TensorLike: TypeAlias = ArrayLike | TensorHandle
"""An array or tensor of whatever library, numbers, or the handle of a tensor on the server."""

TensorT_co = TypeVar("TensorT_co", bound=Tensor, covariant=True)
"""What the results of one call are."""


@dataclass(frozen=True)
class Device:
    """A device of the server.

    Attributes:
        name: "cpu" or "cuda:N".
        description: What it is, in words.
        total_memory_bytes: How much memory it has.
    """

    name: str
    description: str
    total_memory_bytes: int


@dataclass(frozen=True)
class ServerInfo:
    """What the server is and may.

    Attributes:
        version: Of the gradserve distribution.
        devices: At least the CPU.
        device: The name of the one that ops run on.
        ops_prepared: The kernels of the ops are compiled; before that, calls take longer.
        limits: By name, as ServerLimits in the protos; durations in seconds.
        usage: By name, as ServerUsage in the protos.
        uptime: Seconds since it started.
    """

    version: str
    devices: tuple[Device, ...]
    device: str
    ops_prepared: bool
    limits: Mapping[str, float]
    usage: Mapping[str, float]
    uptime: float
