"""Sums of dense gradients (TensorFlow's ConditionalAccumulator)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gradserve_server.accumulators.gradient import Array
from gradserve_server.accumulators.spec import ComponentSpec, DType, Reduction, shape_text
from gradserve_server.errors import InvalidArgumentError

_BLOCK = 1 << 15
"""Elements scaled at a time, so that the scratch memory stays in the cache."""

Allocate = Callable[[tuple[int, ...], np.dtype[Any]], Array]


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


class DenseSum:
    """The running sum of one dense component, rounded to `dtype` at each addition.

    `stage` and `stage_average` do what can fail, and change nothing; the functions that they return cannot fail.
    """

    def __init__(self, dtype: DType, allocate: Allocate) -> None:
        self._dtype = dtype
        self._allocate = allocate
        self._sum: Array | None = None

    @property
    def nbytes(self) -> int:
        """The memory of the sum."""
        return 0 if self._sum is None else self._sum.nbytes

    def growth(self, gradient: Array, *, owned: bool) -> int:
        """Returns the bytes of the memory quota that adding `gradient` takes."""
        if self._sum is not None or self._adoptable(gradient, owned=owned):
            return 0
        return gradient.size * self._dtype.itemsize

    def stage(self, gradient: Array, weight: float, *, owned: bool) -> Callable[[], None]:
        """Prepares an addition; returns the function that carries it out.

        Raises:
            MemoryError: There is not enough memory.
        """
        total = self._sum
        if total is not None:
            return lambda: _add_scaled(total, gradient, weight)
        first = gradient if self._adoptable(gradient, owned=owned) else self._allocate(gradient.shape, self._dtype)

        def begin() -> None:
            if weight != 1.0:
                np.multiply(gradient, weight, out=first, dtype=self._dtype)
            elif first is not gradient:
                np.copyto(first, gradient)
            self._sum = first

        return begin

    def stage_average(self, dtype: DType, reduction: Reduction, total_weight: float) -> Callable[[], Array]:
        """Prepares the end of a round; returns the function that begins the next and returns the result in `dtype`.

        Raises:
            MemoryError: There is not enough memory.
        """
        total = self._sum
        assert total is not None, "a round that ends has at least one gradient"
        result = total if dtype == self._dtype else self._allocate(total.shape, dtype)

        def end() -> Array:
            if reduction is Reduction.MEAN:
                np.divide(total, self._dtype.type(total_weight), out=total)
            if result is not total:
                np.copyto(result, total, casting="unsafe")
            result.flags.writeable = False
            self._sum = None
            return result

        return end

    def _adoptable(self, gradient: Array, *, owned: bool) -> bool:
        return owned and gradient.dtype == self._dtype and gradient.flags.writeable


def _add_scaled(total: Array, gradient: Array, weight: float) -> None:
    if weight == 1.0:
        np.add(total, gradient, out=total)
        return
    flat_total, flat_gradient = total.reshape(-1), gradient.reshape(-1)
    scratch = np.empty(min(_BLOCK, total.size), total.dtype)
    for start in range(0, total.size, _BLOCK):
        block = flat_total[start : start + _BLOCK]
        scaled = scratch[: block.size]
        np.multiply(flat_gradient[start : start + _BLOCK], weight, out=scaled, dtype=total.dtype)
        np.add(block, scaled, out=block)
