"""Finds values that are not finite."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gradserve_server.devices.host.kernel_table import ELEMENTS
from gradserve_server.devices.host.parallel import ForkJoin
from gradserve_server.devices.host.reduction.chunks import addresses, cut
from gradserve_server.devices.host.reduction.kernels import REDUCTION, Kernels

BLOCK = 1 << 15
"""Elements checked at a time, so that the scratch memory stays in the cache."""

_EXPONENTS = {
    np.dtype(np.float16): np.uint16(0x7C00),
    np.dtype(ml_dtypes.bfloat16): np.uint16(0x7F80),
}
"""The exponent's bits, which are all set only in infinities and NaN. For the 16-bit types, because their isfinite takes
ten times as long."""


class Place(NamedTuple):
    """The place of an element in a list of arrays.

    Attributes:
        array: The index of its array.
        position: Its position among the elements of that array.
    """

    array: int
    position: int


def first_non_finite(values: NDArray[Any]) -> int | None:
    """Returns the position of the first value that is infinite or NaN, None if all are finite.

    Takes about as long as adding the values to others.
    """
    flat = values.reshape(-1)
    exponent = _EXPONENTS.get(values.dtype)
    scratch = np.empty(min(BLOCK, flat.size), bool if exponent is None else np.uint16)
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        marks = scratch[: block.size]
        if exponent is None:
            is_finite = np.isfinite(block, out=marks).all()
        else:
            is_finite = np.bitwise_and(block.view(np.uint16), exponent, out=marks).max() != exponent
        if not is_finite:
            return start + int(np.argmin(np.isfinite(block)))
    return None


def search(kernels: Kernels, parallel: ForkJoin, arrays: Sequence[NDArray[Any]], chunk_elements: int) -> Place | None:
    """Does the same for a list of arrays, on all threads; the first one is the same on any number of them.

    Args:
        kernels: The kernels for the dtype of the arrays.
        parallel: The threads.
        arrays: The arrays, aligned and C-contiguous.
        chunk_elements: The number of elements that a thread looks at before it takes others.
    """
    dtype = arrays[0].dtype
    chunks = cut([array.size for array in arrays], chunk_elements)
    spans, firsts = addresses([(array,) for array in arrays], chunks)
    largest = np.dtype(REDUCTION.types[dtype]["S"]).type(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    found = np.full((len(chunks), 2), -1, np.int64)
    arguments = (spans, firsts, largest, np.empty(0, ELEMENTS[dtype]), found)
    kernels.run(parallel, kernels.find_non_finite, arguments, len(chunks))
    for chunk, first, (span, position) in zip(chunks, firsts, found, strict=False):
        if span >= 0:
            which, begin, _ = chunk[span - first]
            return Place(which, begin + int(position))
    return None
