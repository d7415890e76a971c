"""Checks gradients before they are added, and converts them to the dtypes of the accumulator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gradserve_protocol.arrays import DoesNotFitError
from gradserve_server.accumulators.gradient import Array, Gradient, SparseSlices, Value
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.rounds import NOT_FINITE
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec, shape_text
from gradserve_server.errors import InvalidArgumentError

_MISMATCH = "GS_SHAPE_MISMATCH"

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Check:
    """The check of one gradient: what it takes, and its result.

    Attributes:
        spec: The accumulator's spec. The gradient has its components, in its layouts, with real numbers.
        gradient: The gradient.
        place: Where the accumulator is. What is elsewhere is copied there, and so are live gradients before their
            values are checked: later they might be others.
        copied: The dense components that are copied.
        copied_bytes: The memory of the copies, and of sparse values beside them; 0 if there are none.
        work: The number of bytes that the check reads.
    """

    spec: AccumulatorSpec
    gradient: Gradient
    place: Place
    copied: Sequence[str]
    copied_bytes: int
    work: int
    _converts: bool

    @classmethod
    def of(cls, spec: AccumulatorSpec, gradient: Gradient, place: Place) -> "Check":
        """Prepares the check of a gradient, without reading its values."""
        is_read = spec.refuse_non_finite and len(gradient.finite) < len(spec.components)
        copied = place.copied(gradient, is_checked=is_read)
        converts = False  # stored tensors may have other dtypes than the components
        for component in spec.components:
            value = gradient.values[component.name]
            if (value.values if isinstance(value, SparseSlices) else value).dtype != component.dtype:
                converts = True
                break
        copied_bytes = 0
        if copied:
            values = gradient.dense
            sizes = [values[name].size * spec.by_name[name].dtype.itemsize for name in copied]
            copied_bytes = gradient.sparse_nbytes + sum(sizes)
        work = gradient.nbytes if is_read or copied or converts else gradient.sparse_nbytes
        return cls(spec, gradient, place, copied, copied_bytes, work, converts)

    def checked(self, round_shapes: Mapping[str, tuple[int, ...]] | None) -> Gradient:
        """Checks the shapes of all components, and if the spec says so, that their values are finite.

        Args:
            round_shapes: The shapes of the gradients already in the round, None if there are none.

        Returns:
            The gradient, in the place, in the dtypes of the spec.

        Raises:
            InvalidArgumentError: It does not fit the spec or the round, or a value does not fit the dtype.
            MemoryError: There is not enough memory.
        """
        spec, gradient, place, copied = self.spec, self.gradient, self.place, self.copied
        for component in spec.components:
            value = gradient.values[component.name]
            round_shape = round_shapes[component.name] if round_shapes is not None else None
            if isinstance(value, SparseSlices):
                _check_sparse(component, value, round_shape)
            else:
                _check_dense(component, value, round_shape)
        if self._converts:
            # Not owned: some of the arrays may be the caller's.
            values = {each.name: _converted(each, gradient.values[each.name], place) for each in spec.components}
            gradient = Gradient(values, live=gradient.live)
            copied = place.copied(gradient, is_checked=spec.refuse_non_finite)
        if copied:
            gradient = place.copy(gradient)
        if spec.refuse_non_finite:
            unchecked = [each for each in spec.components if each.name not in gradient.finite]
            if unchecked:
                _check_finite(unchecked, gradient, place)
        return gradient


def _converted(component: ComponentSpec, value: Value, place: Place) -> Value:
    if _values(value).dtype == component.dtype:
        return value
    try:
        array = place.converted(_values(value), component.dtype)
    except DoesNotFitError as error:
        raise InvalidArgumentError(
            f"expected values of {component.dtype}, got {error}", field=_values_field(component, value)
        ) from None
    return replace(value, values=array) if isinstance(value, SparseSlices) else array


def _check_finite(components: Sequence[ComponentSpec], gradient: Gradient, place: Place) -> None:
    found = place.reducer.first_non_finite([_values(gradient.values[each.name]) for each in components])
    if found is None:
        return
    component = components[found.array]
    value = gradient.values[component.name]
    values = _values(value)
    index = tuple(map(int, np.unravel_index(found.position, values.shape)))
    whose = f" for component {component.name!r}" if component.name else ""
    where = f" at {shape_text(index)}" if index else ""
    if isinstance(value, SparseSlices):
        where += f", in row {value.indices[index[0]]} of the whole tensor"
    raise InvalidArgumentError(
        f"expected finite values{whose}, got {place.element(values, index)}{where}",
        field=_values_field(component, value),
        code=NOT_FINITE,
    )


def _values(value: Value) -> Array:
    return value.values if isinstance(value, SparseSlices) else value


def _values_field(component: ComponentSpec, value: Value) -> str:
    return f"{component.field}.{'sparse.values' if isinstance(value, SparseSlices) else 'dense'}"


def _check_dense(component: ComponentSpec, gradient: Array, round_shape: tuple[int, ...] | None) -> None:
    """Checks the shape of a gradient.

    Args:
        component: The component.
        gradient: The gradient, of the component's dtype.
        round_shape: The shape of the gradients already in the round, None for the first.

    Raises:
        InvalidArgumentError: The shape does not fit; the message is TensorFlow's.
    """
    if round_shape is not None:
        if gradient.shape == round_shape:
            return
        expected = shape_text(round_shape)
    elif component.shape.accepts(gradient.shape):
        return
    else:
        expected = str(component.shape)
    raise InvalidArgumentError(
        f"Shape mismatch: expected {expected}, got {shape_text(gradient.shape)}",
        field=f"{component.field}.dense.shape",
        code=_MISMATCH,
    )


def _check_sparse(component: ComponentSpec, gradient: SparseSlices, round_shape: tuple[int, ...] | None) -> None:
    """Checks a gradient in TensorFlow's order, and for negative indices, which TensorFlow lets pass.

    Args:
        component: The component, with the shape of the whole tensor.
        gradient: The gradient, with values of the component's dtype.
        round_shape: The shape of the values already in the round, None for the first gradient.

    Raises:
        InvalidArgumentError: The gradient does not fit; the message is TensorFlow's.
    """
    indices, values = gradient.indices, gradient.values
    if indices.ndim != 1:
        raise _sparse_error(
            component, f"Input indices should be vector but received shape: {shape_text(indices.shape)}", "indices"
        )
    if values.ndim == 0:
        raise _sparse_error(component, "Values cannot be 0-dimensional.", "values")
    if values.shape[0] != indices.shape[0]:
        raise _sparse_error(
            component, f"Expected {indices.shape[0]} non-empty input values, got {values.shape[0]}", "values"
        )
    known = component.shape.dims or ()
    if gradient.dense_shape is not None:
        _check_dense_shape(component, known, gradient.dense_shape)
    _check_range(component, known, indices)
    if round_shape is not None:
        _check_row_shape(component, round_shape, values.shape, exact=True)
    else:
        _check_row_shape(component, known, values.shape, exact=False)


def _check_dense_shape(component: ComponentSpec, known: tuple[int, ...], given: tuple[int, ...]) -> None:
    if len(known) > len(given):
        raise _sparse_error(
            component,
            f"Shape mismatch: expected shape rank at least {len(known)}, got {len(given)}",
            "dense_shape",
        )
    for axis, size in enumerate(known):
        if size not in (-1, given[axis]):
            raise _sparse_error(
                component,
                f"Shape mismatch: expected shape dim {axis} to be {size}, got {given[axis]}",
                "dense_shape",
            )


def _check_range(component: ComponentSpec, known: tuple[int, ...], indices: Indices) -> None:
    if indices.size == 0:
        return
    if known and known[0] != -1 and indices.max() >= known[0]:
        position = int(np.argmax(indices >= known[0]))
        raise _sparse_error(
            component,
            f"Shape mismatch: index of slice {position} exceeded limits of shape; "
            f"index is {indices[position]} exceeded {known[0]}",
            "indices",
        )
    if indices.min() < 0:
        position = int(np.argmax(indices < 0))
        raise _sparse_error(
            component, f"expected indices of at least 0, got {indices[position]} at {position}", "indices"
        )


def _check_row_shape(
    component: ComponentSpec, expected: tuple[int, ...], given: tuple[int, ...], *, exact: bool
) -> None:
    """Compares all dimensions but the first. Ranks must be equal if `exact`, otherwise at least the expected one."""
    if len(given) < len(expected) or (exact and len(given) != len(expected)):
        least = "" if exact else "at least "
        raise _sparse_error(
            component,
            f"Shape mismatch: expected values rank {least}{len(expected)}, got {len(given)}",
            "values",
        )
    for axis in range(1, len(expected)):
        if expected[axis] not in (-1, given[axis]):
            raise _sparse_error(
                component,
                f"Shape mismatch: expected values dim {axis} to be {expected[axis]}, got {given[axis]}",
                "values",
            )


def _sparse_error(component: ComponentSpec, message: str, part: str) -> InvalidArgumentError:
    code = _MISMATCH if message.startswith("Shape mismatch") else None
    return InvalidArgumentError(message, field=f"{component.field}.sparse.{part}", code=code)
