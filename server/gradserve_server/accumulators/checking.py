"""Checks a gradient before it is added, and converts it to the dtypes of the accumulator."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gradserve.wire.arrays import DoesNotFitError
from gradserve_server.accumulators.dense import check_dense
from gradserve_server.accumulators.gradient import Array, Gradient, SparseSlices, Value
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.sparse import check_sparse
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec, shape_text
from gradserve_server.accumulators.summation import Shapes
from gradserve_server.errors import InvalidArgumentError


def checking_work(spec: AccumulatorSpec, gradient: Gradient, place: Place) -> int:
    """Returns the number of bytes that `checked_gradient` reads."""
    reads_all = _is_checked(spec, gradient) or _copied(spec, gradient, place) or _other_dtypes(spec, gradient)
    return gradient.nbytes if reads_all else gradient.sparse_nbytes


def copied_bytes(spec: AccumulatorSpec, gradient: Gradient, place: Place) -> int:
    """Returns the memory of the copies that `checked_gradient` makes, and of sparse values beside them."""
    copied = _copied(spec, gradient, place)
    if not copied:
        return 0
    dense = gradient.dense
    return gradient.sparse_nbytes + sum(dense[name].size * spec.by_name[name].dtype.itemsize for name in copied)


def checked_gradient(spec: AccumulatorSpec, gradient: Gradient, round_shapes: Shapes | None, place: Place) -> Gradient:
    """Checks the shapes of all components, and if the spec says so, that their values are finite.

    Args:
        spec: The accumulator's spec. The gradient has its components, in its layouts, with real numbers.
        gradient: The gradient to check.
        round_shapes: The shapes of the gradients already in the round, None if there are none.
        place: Where the accumulator is. What is elsewhere is copied there, and so are live gradients before their
            values are checked: later they might be others.

    Returns:
        The gradient, in that place, in the dtypes of the spec.

    Raises:
        InvalidArgumentError: The gradient does not fit the spec or the round, or a value does not fit the dtype.
        MemoryError: There is not enough memory.
    """
    for component in spec.components:
        value = gradient.values[component.name]
        round_shape = round_shapes[component.name] if round_shapes is not None else None
        if isinstance(value, SparseSlices):
            check_sparse(component, value, round_shape)
        else:
            check_dense(component, value, round_shape)
    if _other_dtypes(spec, gradient):
        # Not owned: some of the arrays may be the caller's.
        values = {each.name: _converted(each, gradient.values[each.name], place) for each in spec.components}
        gradient = Gradient(values, live=gradient.live)
    if _copied(spec, gradient, place):
        gradient = place.copy(gradient)
    if _is_checked(spec, gradient):
        unchecked = [each for each in spec.components if each.name not in gradient.finite]
        _check_finite(unchecked, gradient, place)
    return gradient


def _is_checked(spec: AccumulatorSpec, gradient: Gradient) -> bool:
    return spec.refuse_non_finite and len(gradient.finite) < len(spec.components)


def _copied(spec: AccumulatorSpec, gradient: Gradient, place: Place) -> list[str]:
    """Returns the dense components that are copied before they are added."""
    return place.copied(gradient, is_checked=_is_checked(spec, gradient))


def _other_dtypes(spec: AccumulatorSpec, gradient: Gradient) -> bool:
    """Returns True if a gradient has to be converted: stored tensors may have other dtypes than the components."""
    return any(_values(gradient.values[each.name]).dtype != each.dtype for each in spec.components)


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
    )


def _values(value: Value) -> Array:
    return value.values if isinstance(value, SparseSlices) else value


def _values_field(component: ComponentSpec, value: Value) -> str:
    return f"{component.field}.{'sparse.values' if isinstance(value, SparseSlices) else 'dense'}"
