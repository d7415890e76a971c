"""Gradients and averages: what goes into an accumulator, and what comes out."""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.codecs import Codec
from gradserve_server.accumulators.identity import RequestId
from gradserve_server.resources.budget import Reservation
from gradserve_server.security.identity import Identity

T = TypeVar("T")
Array: TypeAlias = NDArray[Any]
Metrics: TypeAlias = tuple[tuple[str, float], ...]
"""The measurements of the worker of an update: names, in order, with values."""


@dataclass(frozen=True)
class SparseSlices:
    """Rows of a larger tensor, like TensorFlow's IndexedSlices.

    Attributes:
        indices: The row numbers, int64.
        values: The rows.
        dense_shape: The shape of the whole tensor, with -1 for unknown sizes; None if not given.
    """

    indices: NDArray[np.int64]
    values: Array
    dense_shape: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """The memory of both arrays."""
        return self.indices.nbytes + self.values.nbytes


Value: TypeAlias = Array | SparseSlices


@dataclass(frozen=True)
class Packed:
    """The packed form of a dense component.

    Attributes:
        codec: How it is packed.
        data: The bytes, aligned to 4, in memory that nobody changes.
        shape: The shape of the component.
    """

    codec: Codec
    data: NDArray[np.uint8]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The memory of the bytes."""
        return self.data.nbytes

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


class Lender(Protocol):
    """The owner of memory in which values of a gradient are, or were until they were copied."""

    def check_lender(self) -> None:
        """Checks that the lender is still connected.

        Raises:
            AbortedError: The lender has left and has its memory back, which may hold anything by now.
        """
        ...


_MERGE_WORK = 64
"""The work of adding a byte of sparse values, in bytes of dense ones."""


@dataclass(frozen=True)
class Gradient:
    """A value for every component, by name: an array, rows, or the packed form of an array.

    Attributes:
        values: Arrays that only the accumulator may change, if `owned`, and clients, if `live`. Without the components
            that are `packed`.
        owned: Whether the accumulator may take over the memory of the arrays, unless they are live.
        memory: The reservations of that memory.
        live: Whether some dense values are in memory of a client, which can change them at any time and gets the memory
            back after the call. They are read once, for the addition or a checked copy, and once more for the disk.
        finite: The components whose values are known to be finite.
        lenders: The owners of the memory that the values are in or were copied from.
        packed: The packed components.
        is_wide: Whether the values are in the dtypes of the sums rather than those of the components.
        nbytes: The memory of all values.
        sparse_nbytes: The memory of the sparse values, whose indices are read one by one.
    """

    values: Mapping[str, Value]
    owned: bool = False
    memory: tuple[Reservation, ...] = ()
    live: bool = False
    finite: frozenset[str] = frozenset()
    lenders: tuple[Lender, ...] = ()
    packed: Mapping[str, Packed] = field(default_factory=dict)
    is_wide: bool = False
    nbytes: int = field(init=False)
    sparse_nbytes: int = field(init=False)

    def check_lenders(self) -> None:
        """Checks that all lenders are still connected, so that the values read so far are those that they sent.

        Raises:
            AbortedError: One of them has left.
        """
        for each in self.lenders:
            each.check_lender()

    @property
    def is_adoptable(self) -> bool:
        """True if the accumulator may take over the memory of the arrays."""
        return self.owned and not self.live

    def __post_init__(self) -> None:
        total = sparse = 0
        for value in self.values.values():
            total += value.nbytes
            if isinstance(value, SparseSlices):
                sparse += value.nbytes
        for each in self.packed.values():
            total += each.nbytes
        object.__setattr__(self, "nbytes", total)
        object.__setattr__(self, "sparse_nbytes", sparse)

    @property
    def dense(self) -> dict[str, Array]:
        """The dense values."""
        return {name: value for name, value in self.values.items() if not isinstance(value, SparseSlices)}

    @property
    def sparse(self) -> dict[str, SparseSlices]:
        """The sparse values."""
        return {name: value for name, value in self.values.items() if isinstance(value, SparseSlices)}

    @property
    def sparse_work(self) -> int:
        """The bytes of dense values that would take as long to add as the sparse values, which must be merged."""
        return _MERGE_WORK * self.sparse_nbytes

    @property
    def dense_nbytes(self) -> int:
        """The memory of the dense values, packed ones included."""
        return self.nbytes - self.sparse_nbytes


def sum_of_weights(weights: Iterable[float]) -> float:
    """Returns the sum of weights, added from left to right, as a round adds the weights of its gradients one by one."""
    total = 0.0
    for weight in weights:  # since Python 3.12, sum() compensates for rounding, and has other bits
        total += weight
    return total


@dataclass(frozen=True, slots=True)
class Summand:
    """One of the gradients of a sum that counts as all of them.

    Attributes:
        weight: The factor that it has been multiplied with.
        worker_id: The id of its sender; may be empty.
        call: The id of the call that brought it, if it had one; without a fingerprint.
        parameters_digest: See `Contribution`.
        metrics: See `Contribution`.
    """

    weight: float = 1.0
    worker_id: str = ""
    call: RequestId | None = None
    parameters_digest: bytes = b""
    metrics: Metrics = ()


@dataclass(frozen=True, slots=True)
class Measurement:
    """One server's measurement of its pieces of an update of sharded parameters; see `parameters.reductions.exact`.

    Attributes:
        server: The index of the server.
        squared_norm: The squared norm, as terms.
        squared_distances: The squared distances, as terms, to other updates that it held, by their ids.
    """

    server: int
    squared_norm: tuple[float, ...]
    squared_distances: Mapping[str, tuple[float, ...]]


class Share(NamedTuple):
    """The factors of an update's values, as the home of sharded parameters has decided."""

    scale: float
    factor: float


@dataclass(frozen=True)
class Contribution:
    """The sender, step and weight of a gradient, or of the sum of several.

    Attributes:
        local_step: The step at which the worker computed it.
        weight: Its weight in a mean; of a sum, the sum of the weights.
        worker_id: The sender's id; may be empty.
        sequence: A number that orders the gradients of one worker.
        sum_of: The gradients of a sum; empty for one gradient.
        part: In a sharded accumulator, the id under which the servers hold the gradient; otherwise empty.
        epoch: There, the epoch with which it was staged; None if its sender did not say.
        was_accepted: Whether an earlier run of the server has accepted and lost it, so that it counts though the
            accumulator may have moved on.
        parameters_digest: A digest of the parameters at which the worker computed it; empty if they are not compared.
        discount: Of a sum of updates, the factor for its staleness, which `weight` has and the weights and values of
            the sum have not.
        metrics: Of an update, what its worker has measured; of a sum, each update has its own.
        measured: Of an update of sharded parameters, what the other servers have measured.
        share: There, how much it counts; None at the home, which decides that.
    """

    local_step: int = 0
    weight: float = 1.0
    worker_id: str = ""
    sequence: int = 0
    sum_of: tuple[Summand, ...] = ()
    part: str = ""
    epoch: int | None = None
    was_accepted: bool = False
    parameters_digest: bytes = b""
    discount: float = 1.0
    metrics: Metrics = ()
    measured: tuple[Measurement, ...] = ()
    share: Share | None = None

    @property
    def num_gradients(self) -> int:
        """The number of gradients."""
        return len(self.sum_of) or 1

    @property
    def factor(self) -> float:
        """The factor of its values; of a sum only the discount, as its values are multiplied with the weights."""
        return self.discount if self.sum_of else self.weight

    def discounted(self, discount: float) -> "Contribution":
        """Returns a copy whose weight, or the weight of each gradient of a sum, is multiplied with a factor."""
        if not self.sum_of:
            return replace(self, weight=self.weight * discount)
        weight = sum_of_weights([each.weight * discount for each in self.sum_of])
        return replace(self, weight=weight, discount=discount)

    @property
    def workers(self) -> tuple[str, ...]:
        """The ids of the workers that computed it, one for each gradient; may be empty."""
        return tuple([each.worker_id for each in self.sum_of]) if self.sum_of else (self.worker_id,)

    @property
    def digests(self) -> dict[str, bytes]:
        """The digests of the parameters of its workers, by id; without workers that sent none."""
        if not self.sum_of:
            return {self.worker_id: self.parameters_digest} if self.parameters_digest else {}
        return {each.worker_id: each.parameters_digest for each in self.sum_of if each.parameters_digest}

    @property
    def calls(self) -> tuple[RequestId, ...]:
        """The ids of the calls that brought the gradients of a sum."""
        return tuple([each.call for each in self.sum_of if each.call is not None]) if self.sum_of else ()


class OpenGradient(Protocol):
    """Opens the gradient of a call."""

    def __call__(self, use: Callable[[Gradient], Awaitable[T]]) -> Awaitable[T]:
        """Calls a function with the gradient, which stays open until it returns; returns its result.

        If the function raises nothing, the gradient was accepted or dropped.
        """
        ...


async def drop(_gradient: Gradient) -> None:
    """Drops an opened gradient."""


class HostCopy(Protocol):
    """The copy of an average on a device in host memory. Used on the event loop only."""

    async def reserve(self, reservation: Reservation, owner: Identity) -> None:
        """Reserves device memory for handles of the values; makes room if necessary.

        Args:
            reservation: A reservation of the memory where the values are.
            owner: Whose handles they will be.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        ...

    async def values(self) -> Mapping[str, Value]:
        """Returns the values in host memory, copied on the first call.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        ...

    def close(self) -> None:
        """Frees the memory of an average that nobody will ask for again."""
        ...


@dataclass(frozen=True)
class RoundParts:
    """The gradients of a round of a sharded accumulator, which its servers hold.

    Attributes:
        home_incarnation: The incarnation of the accumulator at its home.
        ids: Their ids, in the order in which they are summed.
        weights: Their weights, in that order.
        lowest_step: The step of the round, or the lowest local_step of a gradient in it.
        lowest_epoch: The epoch of the first gradient in it.
        sums: The indices in `ids` of sums of several gradients, whose values are multiplied already.
        oldest_round: The oldest round whose average the home keeps at the time of its answer.
        epoch: The epoch at that time.
        oldest_step: Gradients of that epoch with a smaller local_step are in no round from `oldest_round` on.
        oldest_epoch: Nor are gradients of an epoch before this one.
    """

    home_incarnation: str
    ids: tuple[str, ...]
    weights: tuple[float, ...]
    lowest_step: int = 0
    lowest_epoch: int = 0
    sums: tuple[int, ...] = ()
    oldest_round: int = 0
    epoch: int = 0
    oldest_step: int = 0
    oldest_epoch: int = 0

    def may_need(self, epoch: int, local_step: int) -> bool:
        """Returns True if a gradient may be in `oldest_round` or a later one; False stays true."""
        return epoch >= self.oldest_epoch and (epoch != self.epoch or local_step >= self.oldest_step)

    @property
    def contributions(self) -> dict[str, Contribution]:
        """The contribution of each gradient, by id, in the order of the sum."""
        found = {
            part_id: Contribution(weight=weight, sequence=place)
            for place, (part_id, weight) in enumerate(zip(self.ids, self.weights, strict=True))
        }
        for place in self.sums:
            alone = found[self.ids[place]]
            found[self.ids[place]] = replace(alone, sum_of=(Summand(alone.weight),))
        return found


@dataclass(frozen=True, slots=True)
class DifferentWorker:
    """A worker whose parameters are not those of most.

    Attributes:
        worker_id: Its id.
        equal_at: The latest step at which they were; None if at no step that is remembered.
    """

    worker_id: str
    equal_at: int | None = None


@dataclass(frozen=True)
class Average:
    """The result of a round.

    Attributes:
        values: Read-only arrays by component, in the order of the spec.
        step: The global_step that the round led to.
        round_number: The number of the round.
        num_gradients: The number of gradients in it.
        total_weight: The sum of their weights.
        worker_ids: The ids of their senders, each once, in order of arrival.
        host_copy: The copy in host memory, None if the values are there.
        parts: At the home of a sharded accumulator, the gradients to compute the values from.
        different_workers: The workers whose parameters were not those of most.
    """

    values: Mapping[str, Value]
    step: int
    round_number: int
    num_gradients: int
    total_weight: float
    worker_ids: tuple[str, ...]
    host_copy: HostCopy | None = None
    parts: RoundParts | None = None
    different_workers: tuple[DifferentWorker, ...] = ()

    async def on_host(self) -> "Average":
        """Returns the average in host memory.

        Raises:
            ResourceExhaustedError: There is not enough memory.
        """
        if self.host_copy is None:
            return self
        return replace(self, values=await self.host_copy.values(), host_copy=None)

    def release(self) -> None:
        """Frees the copy of an average that nobody will ask for again."""
        if self.host_copy is not None:
            self.host_copy.close()

    @cached_property
    def nbytes(self) -> int:
        """The memory of all values."""
        return sum([value.nbytes for value in self.values.values()])

    @property
    def arrays(self) -> list[Array]:
        """All arrays, in the order of the components; indices and values of a sparse one."""
        arrays: list[Array] = []
        for value in self.values.values():
            arrays += [value.indices, value.values] if isinstance(value, SparseSlices) else [value]
        return arrays
