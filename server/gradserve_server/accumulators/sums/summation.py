"""Adds up the gradients of a round: as they arrive, or in the order of their workers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from gradserve_server.accumulators.gradient import Array, Contribution, Gradient, Value, sum_of_weights
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.spec import AccumulatorSpec, DType, Reduction
from gradserve_server.accumulators.sums.sparse import SparseSums
from gradserve_server.devices.compute import PIECE_BYTES

ResultT_co = TypeVar("ResultT_co", covariant=True)


class Summation(Protocol):
    """The arithmetic of an accumulator, without the decision on which gradients form a round.

    Calls come one at a time, from any thread. A staged change is carried out before the next is staged, or never. The
    values of a gradient are there, unchanged by anyone but a client, until `finish`.
    """

    @property
    def divides_in_place(self) -> bool:
        """True if a result can be computed in the memory of its sum."""
        ...

    @property
    def takes_packed(self) -> bool:
        """True if packed components can be added as they are; otherwise they come as arrays."""
        ...

    @property
    def shapes(self) -> dict[str, tuple[int, ...]] | None:
        """The shape of the values of each component; None if the first gradient of a round decides about it."""
        ...

    @property
    def nbytes(self) -> int:
        """The memory that it uses."""
        ...

    @property
    def result_nbytes(self) -> int:
        """The memory that a result takes beside the sum; 0 if the sum can become the result."""
        ...

    def growth(self, gradient: Gradient) -> int:
        """Returns the most bytes of the memory budget that adding `gradient` takes."""
        ...

    def adopted(self, gradient: Gradient) -> int:
        """Returns the bytes of an adoptable gradient's memory that adding it takes over."""
        ...

    def stage(
        self, gradient: Gradient, contribution: Contribution, memory: Sequence[Array] | None = None
    ) -> "Staged[None]":
        """Prepares the addition of a checked gradient to the round.

        Args:
            gradient: The gradient.
            contribution: Its weight and place.
            memory: For the first gradient, where the sums of the dense components may be; None for anywhere.

        Raises:
            MemoryError: There is not enough memory; nothing has changed.
        """
        ...

    @property
    def pending_work(self) -> int:
        """The number of bytes that `finish` processes."""
        ...

    def finish(self) -> None:
        """Carries out what is left of the latest addition, which the end of a round may have done; cannot fail."""
        ...

    def drop(self) -> None:
        """Begins the next round without a result of this one; cannot fail."""
        ...

    @property
    def averaging_work(self) -> int:
        """The number of bytes that `stage_average` processes."""
        ...

    def stage_average(self, total_weight: float, memory: Sequence[Array] | None = None) -> "Staged[dict[str, Value]]":
        """Prepares the result of the round; committing it begins the next round.

        Args:
            total_weight: The sum of the weights in order of arrival, the divisor of a mean in that order.
            memory: Where the results of the dense components are written; None for wherever that takes least.

        Raises:
            MemoryError: There is not enough memory; nothing has changed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Staged(Generic[ResultT_co]):
    """A prepared change.

    Attributes:
        commit: Carries out the change; cannot fail.
        work: The number of bytes that `commit` processes.
    """

    commit: Callable[[], ResultT_co]
    work: int = 0


@dataclass(frozen=True, slots=True)
class _Addition:
    """An addition that is decided, but not carried out yet."""

    values: list[Array]
    weight: float
    is_first: bool


class ArrivalOrderSum:
    """Adds each gradient to the sum when it arrives, as TensorFlow does, and rounds to the dtypes of the sums.

    Dense values are added by `finish`, or together with the division if the gradient ends the round.
    """

    takes_packed = False

    def __init__(self, spec: AccumulatorSpec, place: Place) -> None:
        self._spec = spec
        self._dtypes = spec.dense_sum_dtypes
        self._place = place
        self._sparse = SparseSums(spec) if len(self._dtypes) < len(spec.components) else None
        self._sparse_nbytes = 0
        self._sums: list[Array] = []
        """The sums of the dense components, in the order of their dtypes; none before the first gradient of a round."""
        self._dense_nbytes = 0
        self._pending: _Addition | None = None

    @property
    def divides_in_place(self) -> bool:
        """True if the sums have the dtypes of the components."""
        return self._spec.sums_have_dtypes_of_components

    @property
    def shapes(self) -> None:
        """None: the first gradient of a round decides."""
        return

    @property
    def result_nbytes(self) -> int:
        """0: the sums become the result."""
        return 0

    @property
    def nbytes(self) -> int:
        """The memory of the sums."""
        return self._dense_nbytes + self._sparse_nbytes

    def growth(self, gradient: Gradient) -> int:
        """Returns the most bytes of the memory budget that adding `gradient` takes."""
        sparse = 0 if self._sparse is None else self._sparse.growth(gradient)
        if self._sums:
            return sparse
        owned = gradient.is_adoptable
        return sparse + sum(
            [
                value.size * dtype.itemsize
                for value, dtype in zip(self._values(gradient), self._dtypes.values(), strict=True)
                if not (owned and self._is_adoptable(value, dtype))
            ]
        )

    def adopted(self, gradient: Gradient) -> int:
        """Returns the bytes of an adoptable gradient's memory that adding it takes over."""
        if self._sums:
            return 0
        return sum(
            value.nbytes
            for value, dtype in zip(self._values(gradient), self._dtypes.values(), strict=True)
            if self._is_adoptable(value, dtype)
        )

    def stage(
        self, gradient: Gradient, contribution: Contribution, memory: Sequence[Array] | None = None
    ) -> Staged[None]:
        """Prepares the addition of a checked gradient, which must not change until `finish`.

        Raises:
            MemoryError: There is not enough memory.
        """
        self.finish()
        factor = contribution.factor
        add_sparse = () if self._sparse is None else self._sparse.stage(gradient, factor)
        values = self._values(gradient)
        self._place.reducer.make_ready(zip([value.dtype for value in values], self._dtypes.values(), strict=True))
        addition = _Addition(values, factor, is_first=not self._sums)
        sums = self._sums or list(memory or self._new_sums(values, owned=gradient.is_adoptable))
        dense_nbytes = self._dense_nbytes or sum([each.nbytes for each in sums])

        def commit() -> None:
            self._sums, self._pending, self._dense_nbytes = sums, addition, dense_nbytes
            for add in add_sparse:
                add()
            if self._sparse is not None:
                self._sparse_nbytes = self._sparse.nbytes

        return Staged(commit)

    def _new_sums(self, values: Sequence[Array], *, owned: bool) -> Iterable[Array]:
        """Returns where the sums of the first gradient go: adopted memory, or new memory."""
        for value, dtype in zip(values, self._dtypes.values(), strict=True):
            is_adopted = owned and self._is_adoptable(value, dtype)
            yield value if is_adopted else self._place.allocate(value.shape, dtype)

    @property
    def pending_work(self) -> int:
        """The number of bytes that `finish` processes."""
        return self._dense_nbytes if self._pending is not None else 0

    def finish(self) -> None:
        """Adds the dense values of the latest gradient to the sums, unless the end of the round did. Cannot fail."""
        addition, self._pending = self._pending, None
        if addition is None:
            return
        if addition.is_first:
            self._place.reducer.scale(addition.values, addition.weight, self._sums)
        else:
            self._place.reducer.add_scaled(self._sums, addition.values, addition.weight)

    def drop(self) -> None:
        """Drops the sums."""
        if self._sparse is not None:
            self._sparse = SparseSums(self._spec)
        self._sums, self._dense_nbytes, self._sparse_nbytes = [], 0, 0
        self._pending = None

    @property
    def averaging_work(self) -> int:
        """The number of bytes that `stage_average` processes: the quotients of sparse sums are new arrays."""
        return self._sparse_nbytes

    def stage_average(self, total_weight: float, memory: Sequence[Array] | None = None) -> Staged[dict[str, Value]]:
        """Prepares the end of the round. Without `memory`, dense sums are divided in place, unless dtypes differ.

        Raises:
            MemoryError: There is not enough memory.
        """
        end_sparse = {} if self._sparse is None else self._sparse.stage_average()
        results = memory or [
            total if component.dtype == total.dtype else self._place.allocate(total.shape, component.dtype)
            for total, component in zip(self._sums, self._spec.dense_components, strict=True)
        ]
        divisor = total_weight if self._spec.reduction is Reduction.MEAN else 1.0

        def end() -> dict[str, Value]:
            sparse = {name: end_one() for name, end_one in end_sparse.items()}
            self._divide(divisor, results)
            for result in results:
                self._place.protect(result)
            self._sums, self._dense_nbytes, self._sparse_nbytes = [], 0, 0
            return _in_order(self._spec, sparse, results)

        return Staged(end, self._dense_nbytes)

    def _divide(self, divisor: float, results: Sequence[Array]) -> None:
        """Computes the quotients, after the latest addition if that is pending."""
        addition = self._pending
        # Kernels that do both at once have results in the dtypes of gradients; sums of gradients may have others.
        if addition is None or addition.is_first or _have_other_dtypes(addition.values, results):
            self.finish()
            self._place.reducer.divide(self._sums, divisor, results)
        else:
            self._pending = None
            self._place.reducer.add_and_divide(self._sums, addition.values, addition.weight, divisor, results)

    def _values(self, gradient: Gradient) -> list[Array]:
        values: Mapping[str, Any] = gradient.values
        return [values[name] for name in self._dtypes]

    def _is_adoptable(self, value: Array, dtype: DType) -> bool:
        return value.dtype == dtype and self._place.may_be_written(value)


def _have_other_dtypes(values: Sequence[Array], results: Sequence[Array]) -> bool:
    return any(value.dtype != result.dtype for value, result in zip(values, results, strict=True))


class HeldGradients:
    """Holds the gradients of a round until its end: the part of a `Summation` that says how they come and stay."""

    divides_in_place = False
    takes_packed = False

    def __init__(self, place: Place) -> None:
        self._place = place
        self._held: list[tuple[Contribution, Gradient]] = []
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """The memory of the gradients held."""
        return self._nbytes

    def growth(self, gradient: Gradient) -> int:
        """Returns the bytes of the memory budget that holding `gradient` takes."""
        return 0 if gradient.is_adoptable else gradient.nbytes

    def adopted(self, gradient: Gradient) -> int:
        """Returns the bytes of an adoptable gradient's memory that holding it takes over: all of them."""
        return gradient.nbytes

    def stage(
        self, gradient: Gradient, contribution: Contribution, memory: Sequence[Array] | None = None
    ) -> Staged[None]:
        """Prepares to hold a checked gradient, or a copy of it if others may change it.

        Raises:
            MemoryError: There is not enough memory.
        """
        if not gradient.live:
            return Staged(partial(self._hold, contribution, gradient))
        copied, fill = self._place.stage_copy(gradient)

        def fill_and_hold() -> None:
            fill()
            self._hold(contribution, copied)

        return Staged(fill_and_hold, gradient.dense_nbytes)

    def _hold(self, contribution: Contribution, gradient: Gradient) -> None:
        self._held.append((contribution, gradient))
        self._nbytes += gradient.nbytes

    def drop(self) -> None:
        """Drops the gradients."""
        self._held, self._nbytes = [], 0

    @property
    def pending_work(self) -> int:
        """The number of bytes that `finish` processes: none."""
        return 0

    def finish(self) -> None:
        """Does nothing: gradients are held as they are."""


class WorkerOrderSum(HeldGradients):
    """Holds the gradients of a round, and at its end adds them in the order of (worker_id, sequence).

    The same gradients give the same bits, in whatever order they arrive.
    """

    def __init__(self, spec: AccumulatorSpec, place: Place) -> None:
        super().__init__(place)
        self._spec = spec

    @property
    def shapes(self) -> None:
        """None: the first gradient of a round decides."""
        return

    @property
    def result_nbytes(self) -> int:
        """0: the result takes no more memory than a gradient that was held."""
        return 0

    @property
    def held(self) -> Sequence[Gradient]:
        """The gradients held."""
        return [gradient for _, gradient in self._held]

    def borrow(self, gradients: Sequence[Gradient], contributions: Iterable[Contribution]) -> None:
        """Holds gradients whose memory others count; the sequences of what they contribute say in which order."""
        self._held = list(zip(contributions, gradients, strict=True))

    @property
    def averaging_work(self) -> int:
        """The number of bytes that `stage_average` processes, which includes adding up."""
        return sum([gradient.nbytes for _, gradient in self._held]) + PIECE_BYTES * len(self._held)

    def stage_average(self, total_weight: float, memory: Sequence[Array] | None = None) -> Staged[dict[str, Value]]:
        """Adds up the gradients, and prepares the end of the round.

        Raises:
            MemoryError: There is not enough memory.
        """
        held = sorted(self._held, key=lambda held: worker_order(held[0]))
        # In this order, too: the sum of weights depends on it.
        total_weight = sum_of_weights([contribution.weight for contribution, _ in held])
        sparse = SparseSums(self._spec)
        for contribution, gradient in held:
            for commit in sparse.stage(gradient, contribution.factor):
                commit()
        ends = sparse.stage_average()
        dense = self._averages(held, total_weight, memory) if self._spec.dense_components else []
        result = _in_order(self._spec, {name: end_sparse() for name, end_sparse in ends.items()}, dense)

        def end() -> dict[str, Value]:
            self.drop()
            return result

        return Staged(end)

    def _averages(
        self, held: Sequence[tuple[Contribution, Gradient]], total_weight: float, memory: Sequence[Array] | None
    ) -> list[Array]:
        """Returns the results of the dense components. Gradients are not changed: a later step may fail."""
        spec, place = self._spec, self._place
        dtypes = list(spec.dense_sum_dtypes.values())
        gradients = []
        for _, gradient in held:
            values: Mapping[str, Any] = gradient.values
            gradients.append([values[each.name] for each in spec.dense_components])
        shapes = [value.shape for value in gradients[0]]
        results = list(memory or map(place.allocate, shapes, [each.dtype for each in spec.dense_components]))
        totals: Sequence[Array] | None = None
        has_sums = any(contribution.sum_of for contribution, _ in held)
        if has_sums or place.reducer.needs_totals(len(held)):
            totals = [
                result if result.dtype == dtype else place.allocate(shape, dtype)
                for result, shape, dtype in zip(results, shapes, dtypes, strict=True)
            ]
        factors = [contribution.factor for contribution, _ in held]
        divisor = total_weight if spec.reduction is Reduction.MEAN else 1.0
        if has_sums and totals is not None:
            # Of several dtypes, one by one; with the same bits.
            place.reducer.scale(gradients[0], factors[0], totals)
            for arrays, factor in zip(gradients[1:], factors[1:], strict=True):
                place.reducer.add_scaled(totals, arrays, factor)
            place.reducer.divide(totals, divisor, results)
        else:
            place.reducer.add_up(gradients, factors, divisor, dtypes, totals, results)
        for result in results:
            place.protect(result)
        return results


def _in_order(spec: AccumulatorSpec, sparse: Mapping[str, Value], dense: Sequence[Array]) -> dict[str, Value]:
    """Returns the values of all components in the order of the spec."""
    values: dict[str, Value] = dict(sparse)
    values.update(zip((each.name for each in spec.dense_components), dense, strict=True))
    return {component.name: values[component.name] for component in spec.components}


def worker_order(contribution: Contribution) -> tuple[str, int]:
    """Returns the key by which gradients are sorted into the order of their workers."""
    return contribution.worker_id, contribution.sequence


def make_summation(spec: AccumulatorSpec, place: Place) -> Summation:
    """Returns the summation that `spec` asks for, of gradients in a place."""
    return (WorkerOrderSum if spec.deterministic else ArrivalOrderSum)(spec, place)
