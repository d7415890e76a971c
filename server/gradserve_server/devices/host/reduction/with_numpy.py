"""Element-wise arithmetic by NumPy: what the kernels compute, for any dtypes."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_BLOCK = 1 << 18
"""The elements whose intermediate results are kept: a megabyte, which stays in the last cache."""


def scale(factor: float, source: Array, out: Array) -> None:
    """Computes out = source factor, in the dtype of `out`."""
    if factor == 1.0:
        np.copyto(out, source)
    else:
        np.multiply(source, out.dtype.type(factor), out=out, dtype=out.dtype)


def scale_in_place(factor: float, source: Array) -> None:
    """Computes source *= factor."""
    np.multiply(source, source.dtype.type(factor), out=source)


def add_scaled(factor: float, total: Array, source: Array) -> None:
    """Computes total += source factor, in the dtype of `total`."""
    if factor == 1.0:
        np.add(total, source, out=total)
        return
    if total.size <= _BLOCK:
        np.add(total, np.multiply(source, total.dtype.type(factor), dtype=total.dtype), out=total)
        return
    for block, scratch in _blocks(total):
        np.multiply(source[block], total.dtype.type(factor), out=scratch, dtype=total.dtype)
        np.add(total[block], scratch, out=total[block])


def divide_in_place(divisor: float, total: Array) -> None:
    """Computes total /= divisor."""
    if divisor != 1.0:
        np.divide(total, total.dtype.type(divisor), out=total)


def divide(divisor: float, total: Array, out: Array) -> None:
    """Computes out = total / divisor, in the dtype of `total`, then rounded to that of `out`."""
    if out.dtype == total.dtype:
        np.divide(total, total.dtype.type(divisor), out=out)
        return
    if total.size <= _BLOCK:
        np.copyto(out, np.divide(total, total.dtype.type(divisor)), casting="unsafe")
        return
    for block, scratch in _blocks(total):
        np.divide(total[block], total.dtype.type(divisor), out=scratch)
        np.copyto(out[block], scratch, casting="unsafe")


def add_and_divide_in_place(factor: float, divisor: float, total: Array, source: Array) -> None:
    """Computes total = (total + source factor) / divisor, in the dtype of `total`."""
    add_scaled(factor, total, source)
    divide_in_place(divisor, total)


def add_and_divide(factor: float, divisor: float, total: Array, source: Array, out: Array) -> None:
    """Computes out = (total + source factor) / divisor, in the dtype of `total`, then rounded to that of `out`.

    Changes `total`.
    """
    add_scaled(factor, total, source)
    divide(divisor, total, out)


def _blocks(total: Array) -> Iterator[tuple[slice, Array]]:
    scratch = np.empty(min(_BLOCK, total.size), total.dtype)
    for start in range(0, total.size, _BLOCK):
        block = slice(start, min(start + _BLOCK, total.size))
        yield block, scratch[: block.stop - start]
