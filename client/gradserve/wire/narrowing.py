"""Converts arrays to other dtypes, but not values that would become infinite or another integer."""

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray


class DoesNotFitError(ValueError):
    """A value cannot be represented in a dtype, not even rounded."""


def converted(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns an array of real numbers as a C-contiguous one of another dtype, or itself if it is that already.

    Floating dtypes round. NaN and infinities stay what they are.

    Raises:
        DoesNotFitError: A finite value would become infinite, or an integer another; the message has the value.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        result = np.asarray(array, dtype, order="C")
    if dtype.kind in "iu":
        lost = result != array
    elif _largest(array.dtype) > _largest(dtype):
        lost = np.isinf(result)
        if lost.any():
            lost &= np.isfinite(array)
    else:
        return result
    if lost.any():
        index = tuple(map(int, np.unravel_index(int(np.argmax(lost)), lost.shape)))
        raise DoesNotFitError(text_of(array[index], index, dtype))
    return result


def text_of(number: np.generic, index: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    """Returns the message of an element that does not fit into a dtype."""
    where = f" at {list(index)}" if index else ""
    return f"{_text(number)}{where}, which does not fit into {dtype}"


@cache
def _largest(dtype: np.dtype[Any]) -> float:
    """Returns the largest finite number of a dtype."""
    if dtype.kind == "b":
        return 1.0
    if dtype.kind in "iu":
        return float(np.iinfo(dtype).max)
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def _text(number: np.generic) -> str:
    return str(number) if isinstance(number, np.integer) else f"{float(number):g}"
