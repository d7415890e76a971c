"""Sums of dense gradients (TensorFlow's ConditionalAccumulator)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradserve_server.accumulators.gradient import Array, Gradient
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.spec import ComponentSpec, DType, Reduction, shape_text
from gradserve_server.errors import InvalidArgumentError


def check_dense(component: ComponentSpec, gradient: Array, round_shape: tuple[int, ...] | None) -> None:
    """Checks the shape of a gradient.

    Args:
        component: The component.
        gradient: The gradient, of the component's dtype.
        round_shape: The shape of the gradients already in the round, None for the first.

    Raises:
        InvalidArgumentError: The shape does not fit; the message is TensorFlow's.
    """
    if round_shape is not None and gradient.shape != round_shape:
        expected = shape_text(round_shape)
    elif not component.shape.accepts(gradient.shape):
        expected = str(component.shape)
    else:
        return
    raise InvalidArgumentError(
        f"Shape mismatch: expected {expected}, got {shape_text(gradient.shape)}",
        field=f"{component.field}.dense.shape",
    )


@dataclass(frozen=True)
class _Addition:
    """An addition that is decided, but not carried out yet."""

    values: list[Array]
    weight: float
    is_first: bool


class DenseSums:
    """The running sums of all dense components, rounded to the dtypes of the sums at each addition.

    `stage` and `stage_average` do what can fail, and change nothing; the functions that they return cannot fail. An
    addition is carried out by `finish`, or together with the division if it ends the round.
    """

    def __init__(self, dtypes: Mapping[str, DType], place: Place) -> None:
        """Takes the dtype of the sum of each component, and where the sums are."""
        self._dtypes = dtypes
        self._place = place
        self._reducer = place.reducer
        self._allocate = place.allocate
        self._sums: list[Array] = []
        """In the order of `dtypes`; none before the first gradient of a round."""
        self._pending: _Addition | None = None
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """The memory of the sums."""
        return self._nbytes

    def growth(self, gradient: Gradient) -> int:
        """Returns the bytes of the memory quota that adding `gradient` takes."""
        if self._sums:
            return 0
        return sum(
            value.size * dtype.itemsize
            for value, dtype in zip(self._values(gradient), self._dtypes.values(), strict=True)
            if not self._is_adoptable(value, dtype, owned=gradient.is_adoptable)
        )

    def adopted(self, gradient: Gradient) -> int:
        """Returns the bytes of an adoptable gradient's memory that adding it takes over."""
        if self._sums:
            return 0
        return sum(
            value.nbytes
            for value, dtype in zip(self._values(gradient), self._dtypes.values(), strict=True)
            if self._is_adoptable(value, dtype, owned=True)
        )

    def stage(self, gradient: Gradient, weight: float, memory: Sequence[Array] | None = None) -> Callable[[], None]:
        """Prepares an addition; returns the function that decides it. The gradient must not change until `finish`.

        Args:
            gradient: The gradient.
            weight: Its factor.
            memory: The sums, to be written, if it is the first gradient; None to adopt or allocate memory.

        Raises:
            MemoryError: There is not enough memory.
        """
        self.finish()
        values = self._values(gradient)
        self._reducer.make_ready(zip((value.dtype for value in values), self._dtypes.values(), strict=True))
        addition = _Addition(values, weight, is_first=not self._sums)
        sums = (
            self._sums
            or memory
            or [
                value
                if self._is_adoptable(value, dtype, owned=gradient.is_adoptable)
                else self._allocate(value.shape, dtype)
                for value, dtype in zip(values, self._dtypes.values(), strict=True)
            ]
        )

        nbytes = self._nbytes or sum([each.nbytes for each in sums])

        def begin() -> None:
            self._sums, self._pending, self._nbytes = list(sums), addition, nbytes

        return begin

    @property
    def pending_work(self) -> int:
        """The number of bytes that `finish` processes."""
        return self.nbytes if self._pending is not None else 0

    def finish(self) -> None:
        """Carries out the latest addition, if that has not been done, and forgets the gradient. Cannot fail."""
        addition, self._pending = self._pending, None
        if addition is None:
            return
        if addition.is_first:
            self._reducer.scale(addition.values, addition.weight, self._sums)
        else:
            self._reducer.add_scaled(self._sums, addition.values, addition.weight)

    def stage_average(
        self,
        dtypes: Sequence[DType],
        reduction: Reduction,
        total_weight: float,
        memory: Sequence[Array] | None = None,
    ) -> Callable[[], list[Array]]:
        """Prepares the end of a round; returns the function that begins the next and returns the results.

        Args:
            dtypes: The dtypes of the results.
            reduction: Whether to divide the sums.
            total_weight: The divisor of a mean.
            memory: The results, to be written. If it is None, sums are divided in place, unless dtypes differ.

        Raises:
            MemoryError: There is not enough memory.
        """
        results = memory or [
            total if dtype == total.dtype else self._allocate(total.shape, dtype)
            for total, dtype in zip(self._sums, dtypes, strict=True)
        ]

        def end() -> list[Array]:
            self._divide(total_weight if reduction is Reduction.MEAN else 1.0, results)
            for result in results:
                self._place.protect(result)
            self._sums, self._nbytes = [], 0
            return list(results)

        return end

    def _divide(self, divisor: float, results: Sequence[Array]) -> None:
        """Computes the quotients, after the latest addition if that is pending."""
        addition = self._pending
        # Kernels that do both at once have results in the dtypes of gradients; sums of gradients may have others.
        if addition is None or addition.is_first or _have_other_dtypes(addition.values, results):
            self.finish()
            self._reducer.divide(self._sums, divisor, results)
        else:
            self._pending = None
            self._reducer.add_and_divide(self._sums, addition.values, addition.weight, divisor, results)

    def _values(self, gradient: Gradient) -> list[Array]:
        values: Mapping[str, Any] = gradient.values
        return [values[name] for name in self._dtypes]

    def _is_adoptable(self, gradient: Array, dtype: DType, *, owned: bool) -> bool:
        return owned and gradient.dtype == dtype and self._place.may_be_written(gradient)


def _have_other_dtypes(values: Sequence[Array], results: Sequence[Array]) -> bool:
    return any(value.dtype != result.dtype for value, result in zip(values, results, strict=True))
