"""Packed components of gradients: their check, and arrays of their values for sums that need whole arrays."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gradserve_protocol.codecs import MalformedError
from gradserve_server.accumulators.gradient import Array, Gradient, Packed
from gradserve_server.accumulators.places.place import Place
from gradserve_server.accumulators.rounds import NOT_FINITE
from gradserve_server.accumulators.spec import AccumulatorSpec, ComponentSpec, DType
from gradserve_server.errors import InvalidArgumentError

WORK = 8
"""The work of checking or unpacking a packed byte, in bytes of element-wise work, at most."""


def check_packed(spec: AccumulatorSpec, packed: Mapping[str, Packed]) -> None:
    """Checks the bytes of packed components, so that they can be unpacked without another look.

    Args:
        spec: The spec of the sums; it says whether values must be finite.
        packed: The components.

    Raises:
        InvalidArgumentError: Bytes are not the packed form of a component, or a value is infinite or NaN.
    """
    for name, value in packed.items():
        component = spec.by_name[name]
        try:
            value.codec.check(value.data, value.size)
        except MalformedError as error:
            raise _error(component, str(error)) from None
        if spec.refuse_non_finite and not value.codec.is_finite(value.data):
            raise _error(component, f"expected finite values for component {name!r}, got infinity or NaN", NOT_FINITE)


def _error(component: ComponentSpec, message: str, code: str | None = None) -> InvalidArgumentError:
    return InvalidArgumentError(message, field=f"{component.field}.packed.data", code=code)


def unpacked_bytes(packed: Mapping[str, Packed], dtypes: Mapping[str, DType]) -> int:
    """Returns the memory of the values of packed components in the dtypes of their sums."""
    return sum([value.size * dtypes[name].itemsize for name, value in packed.items()])


def unpacked(gradient: Gradient, dtypes: Mapping[str, DType], place: Place) -> Gradient:
    """Returns a gradient with arrays in place of its packed components, which were checked.

    The accumulator may take over the memory of these; that of other arrays as before.

    Args:
        gradient: The gradient.
        dtypes: The dtypes of sums by component.
        place: Allocates.

    Raises:
        MemoryError: There is not enough memory.
    """
    arrays: dict[str, Array] = {}
    for name, value in gradient.packed.items():
        array = arrays[name] = place.allocate(value.shape, dtypes[name])
        flat = array.reshape(-1)
        for begin, piece in value.codec.pieces(value.data, value.size):
            np.copyto(flat[begin : begin + piece.size], piece)
    finite = gradient.finite | {
        name for name in arrays if gradient.packed[name].codec.is_finite(gradient.packed[name].data)
    }
    owned = gradient.owned or not gradient.values
    return replace(gradient, values={**gradient.values, **arrays}, packed={}, finite=finite, owned=owned, is_wide=True)
